"""A sampler whose answers come from a provider's model. They have messages and usage, and no token ids.

The key comes from the workspace's secrets when a request is sent, and never enters a sandbox. Requests
and money are counted for each evaluation, over all workers.
"""

import json
from collections.abc import Awaitable, Callable

from infra.model_api.providers.client import ProviderClient, ProviderRefusal
from infra.model_api.wire.errors import no_token_count
from infra.ports.provider_usage import ProviderUsage
from infra.ports.secrets import SecretStore
from schemas.errors import FailureCategory, InvalidConfig, UserCodeError
from schemas.models.constraints import Constraint
from schemas.sampling import (
    ProviderRef,
    Sampler,
    SampleRequest,
    StreamingSampler,
    Tell,
    TokenCounter,
    Turn,
)
from schemas.secrets.rules import how_to_set
from schemas.secrets.secret_value import SecretValue

FindKey = Callable[[ProviderRef], Awaitable[SecretValue | None]]
"""Returns the key of a provider's API, or None when it needs none. Raises UserCodeError when there must
be one and it is not set."""

TOO_LONG = ("context_length", "context length", "maximum context", "too many tokens")
"""Words of a provider's refusal of a prompt that is too long."""


class ProviderSampler:
    """`schemas.sampling.Sampler` for models of kind `provider`."""

    def __init__(self, client: ProviderClient, find_key: FindKey, usage: ProviderUsage) -> None:
        self._client = client
        self._find_key = find_key
        self._usage = usage

    async def sample(self, request: SampleRequest) -> Turn:
        """Ask for one answer. Raises UserCodeError when the provider refuses it or a bound is reached,
        and TransientError when the provider does not answer."""
        provider = _provider(request)
        key = await self._find_key(provider)
        if (why := await self._usage.begin(provider)) is not None:
            raise UserCodeError(FailureCategory.BUDGET, why)
        try:
            answer = await self._client.complete(
                provider,
                request.messages,
                key=key,
                tools=request.tools,
                options=_options(request, provider),
            )
        except (ProviderRefusal, InvalidConfig) as error:
            is_long = any(words in error.message.lower() for words in TOO_LONG)
            category = FailureCategory.PROMPT_TOO_LONG if is_long else FailureCategory.PROVIDER
            raise UserCodeError(category, error.message) from error
        if answer.usage.usd:
            await self._usage.spend(provider.owner, answer.usage.usd)
        return Turn(
            prompt_ids=(),
            completion_ids=(),
            logprobs=(),
            text=answer.message.content,
            finish_reason="length" if answer.finish_reason == "length" else "stop",
            answer=answer.message,
            usage=answer.usage,
        )

    async def prepare(self, request: SampleRequest) -> None:
        """Do nothing: a provider has its models loaded."""


class RoutedSampler:
    """`schemas.sampling.Sampler` that asks the provider's sampler for models of providers, and the
    engine for all others."""

    def __init__(self, engine: Sampler, provider: ProviderSampler) -> None:
        self._engine = engine
        self._provider = provider

    async def sample(self, request: SampleRequest) -> Turn:
        """Sample one completion. Raises what the chosen sampler raises."""
        return await self._sampler(request).sample(request)

    async def stream(self, request: SampleRequest, tell: Tell) -> Turn:
        """Sample one completion, and tell its text meanwhile if the chosen sampler can. Raises what it
        raises."""
        sampler = self._sampler(request)
        if isinstance(sampler, StreamingSampler):
            return await sampler.stream(request, tell)
        return await sampler.sample(request)

    async def count_prompt_tokens(self, request: SampleRequest) -> int:
        """Return how many tokens the prompt of a request has. Raises GatewayError (404) if the chosen
        sampler does not know."""
        sampler = self._sampler(request)
        if not isinstance(sampler, TokenCounter):
            raise no_token_count()
        return await sampler.count_prompt_tokens(request)

    async def prepare(self, request: SampleRequest) -> None:
        """Load what this request is sampled from."""
        await self._sampler(request).prepare(request)

    def _sampler(self, request: SampleRequest) -> Sampler:
        return self._provider if request.model.kind == "provider" else self._engine


def stored_keys(secrets: SecretStore) -> FindKey:
    """Return a function that finds keys among the secrets of a workspace, or of the person who submitted
    the evaluation."""

    async def find(provider: ProviderRef) -> SecretValue | None:
        name = provider.secret
        if name is None:
            return None
        values = await secrets.resolve(
            (name,), workspace=provider.workspace, submitter=provider.submitter
        )
        if name not in values:
            raise UserCodeError(FailureCategory.PROVIDER, how_to_set((name,), pushed=False))
        return values[name]

    return find


def _provider(request: SampleRequest) -> ProviderRef:
    if request.model.provider is None:
        raise InvalidConfig(
            f"the model {request.model.name} is not one of a provider; name another"
        )
    return request.model.provider


def _options(request: SampleRequest, provider: ProviderRef) -> dict[str, object]:
    params = request.params
    options: dict[str, object] = {
        "temperature": params.temperature,
        provider.limit: params.max_new_tokens,
    }
    if params.top_p != 1.0:
        options["top_p"] = params.top_p
    if params.stop:
        options["stop"] = list(params.stop)
    if request.constraint is not None:
        options |= _constraint_options(request.constraint)
    return options


def _constraint_options(constraint: Constraint) -> dict[str, object]:
    """The parameters that force an answer to be what the request says."""
    if constraint.json_schema is not None:
        form = {"name": "answer", "schema": json.loads(constraint.json_schema)}
        return {"response_format": {"type": "json_schema", "json_schema": form}}
    if len(constraint.calls) == 1:
        function = {"name": constraint.calls[0]}
        return {"tool_choice": {"type": "function", "function": function}}
    return {"tool_choice": "required"}
