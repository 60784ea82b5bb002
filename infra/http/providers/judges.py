"""Judges among the models of providers: `infra.ports.judges.Judges`."""

from collections.abc import Mapping, Sequence

from infra.http.providers.client import ProviderAway, ProviderClient, ProviderRefusal
from infra.http.providers.endpoints import provider_ref
from schemas.errors import JudgeAway, TransientError
from schemas.sampling import JudgeAnswer, JudgeUsage, Message
from schemas.secrets.secret_value import SecretValue
from schemas.specs import RubricSpec

PATIENCE_S = 90.0
"""How long one request may take, with its retries. After that its group waits and asks again."""

MOST_TOKENS = 4096
"""New tokens of an answer, which include what a judge thinks first."""

ONE_REQUEST = (400, 413, 422)
"""Statuses by which a provider refuses one request, and not its key or model."""


class ProviderJudges:
    """Asks the models of providers, and of OpenAI-compatible servers, for judgements."""

    def __init__(self, client: ProviderClient, *, patience_s: float = PATIENCE_S) -> None:
        self._client = client
        self._patience_s = patience_s

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
        options: dict[str, object] = {
            ref.limit: MOST_TOKENS,
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": named},
        }
        try:
            answer = await self._client.complete(
                ref, messages, key=key, options=options, deadline_s=self._patience_s
            )
        except ProviderRefusal as error:
            if error.answered in ONE_REQUEST:
                return JudgeAnswer(text="", finish_reason="refused", refusal=error.message)
            raise
        except ProviderAway as error:
            if error.is_waiting:
                raise JudgeAway(f"the judge of rubric {rubric.name}: {error}") from error
            raise TransientError(f"the judge of rubric {rubric.name}: {error}") from error
        tokens = answer.usage.prompt_tokens + answer.usage.completion_tokens
        return JudgeAnswer(
            text=answer.message.content,
            finish_reason=answer.finish_reason,
            usage=JudgeUsage(calls=1, tokens=tokens, usd=answer.usage.usd or 0.0),
        )
