"""The ports to judges: the models that score answers, and the record of what they said."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from schemas.sampling import JudgeAnswer, Judgement, JudgeUsage, Message
from schemas.secrets.secret_value import SecretValue
from schemas.specs import JudgeBudget, RubricSpec


class Judges(Protocol):
    """Models that score answers, wherever they run."""

    async def ask(
        self,
        rubric: RubricSpec,
        messages: Sequence[Message],
        *,
        key: SecretValue | None,
        schema: Mapping[str, object],
    ) -> JudgeAnswer:
        """Ask the judge of a rubric once, for JSON by this schema (which a model may ignore). Raises
        Refused when it refuses every request for good (its key or model is wrong), JudgeAway when it
        cannot be reached or limits the rate for longer than a minute, and TransientError when it fails
        otherwise. No error shows the key."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class JudgementRecord(Protocol):
    """The judgements and their usage, durable at once, so that nothing is asked and paid for twice."""

    async def find_judgements(self, owner: str, keys: Sequence[str]) -> Mapping[str, Judgement]:
        """Return the judgements of a run or evaluation that are recorded under these keys."""
        ...

    async def reserve(self, owner: str, budget: JudgeBudget) -> str | None:
        """Count one request before it is made. Returns None, or what is used up. Calls never exceed the
        budget. Tokens and dollars are known only afterwards, so they exceed it at most by the requests
        that are open."""
        ...

    async def spend(self, owner: str, usage: JudgeUsage) -> None:
        """Add the tokens and dollars of an answer (its call was counted by `reserve`)."""
        ...

    async def record(
        self, owner: str, judgements: Mapping[str, Judgement]
    ) -> Mapping[str, Judgement]:
        """Record judgements under their keys, all or none of them, and return them. If another one is
        recorded under a key, that one stays and is returned."""
        ...

    async def usage(self, owner: str) -> JudgeUsage:
        """Return what was used so far."""
        ...
