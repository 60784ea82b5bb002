"""Judges among the models of providers: `infra.ports.judges.Judges`."""

from collections.abc import Mapping, Sequence

from infra.model_api.providers.client import ProviderAway, ProviderClient, ProviderRefusal
from infra.model_api.providers.endpoints import provider_ref
from schemas.errors import JudgeAway, TransientError
from schemas.sampling import JudgeAnswer, JudgeUsage, Message, ProviderRef
from schemas.secrets.secret_value import SecretValue
from schemas.specs import RubricSpec

PATIENCE_S = 90.0
"""How long one request may take, with its retries. After that its group waits and asks again."""

MOST_TOKENS = {"sample": 4096, "group": 16_384}
"""New tokens of an answer, by the scope of its rubric. They include what a judge thinks first."""

ONE_REQUEST = (400, 413, 422)
"""Statuses by which a provider refuses one request, and not its key or model."""


class ProviderJudges:
    """Asks the models of providers, and of OpenAI-compatible servers, for judgements. A model that
    refuses the schema of an answer is asked without it from then on."""

    def __init__(self, client: ProviderClient, *, patience_s: float = PATIENCE_S) -> None:
        self._client = client
        self._patience_s = patience_s
        self._formless: set[tuple[str, str]] = set()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def ask(
        self,
        rubric: RubricSpec,
        messages: Sequence[Message],
        *,
        key: SecretValue | None,
        schema: Mapping[str, object],
    ) -> JudgeAnswer:
        ref = provider_ref(rubric.model, base_url=rubric.base_url, secret=rubric.api_key_secret)
        ref = ref.model_copy(update={"usd_per_million": rubric.usd_per_million})
        named = {"name": "judgement", "strict": True, "schema": dict(schema)}
        options: dict[str, object] = {ref.limit: MOST_TOKENS[rubric.scope], "temperature": 0}
        form = {"response_format": {"type": "json_schema", "json_schema": named}}
        place = (ref.base_url, ref.model)
        try:
            if place in self._formless:
                return await self._complete(ref, messages, key=key, options=options)
            answer = await self._complete(ref, messages, key=key, options={**options, **form})
            if answer.refusal is None:
                return answer
            plain = await self._complete(ref, messages, key=key, options=options)
            if plain.refusal is None:
                self._formless.add(place)
            return plain
        except ProviderAway as error:
            if error.is_waiting:
                raise JudgeAway(f"the judge of rubric {rubric.name}: {error}") from error
            raise TransientError(f"the judge of rubric {rubric.name}: {error}") from error

    async def _complete(
        self,
        ref: ProviderRef,
        messages: Sequence[Message],
        *,
        key: SecretValue | None,
        options: Mapping[str, object],
    ) -> JudgeAnswer:
        """Make one request. Raises ProviderRefusal unless it concerns this request alone, ProviderAway
        and TransientError."""
        try:
            answer = await self._client.complete(
                ref, messages, key=key, options=options, deadline_s=self._patience_s
            )
        except ProviderRefusal as error:
            if error.answered in ONE_REQUEST:
                return JudgeAnswer(text="", finish_reason="refused", refusal=error.message)
            raise
        tokens = answer.usage.prompt_tokens + answer.usage.completion_tokens
        return JudgeAnswer(
            text=answer.message.content,
            finish_reason=answer.finish_reason,
            usage=JudgeUsage(calls=1, tokens=tokens, usd=answer.usage.usd or 0.0),
        )
