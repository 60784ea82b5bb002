"""Judgements and the usage of judges in memory. They pass the same contract suite as those on
Postgres."""

from collections.abc import Mapping, Sequence

from infra.runtime.judgements import used_up
from schemas.sampling import Judgement, JudgeUsage
from schemas.specs import JudgeBudget


class MemoryJudgements:
    """`infra.ports.judges.JudgementRecord` in memory."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Judgement] = {}
        self._usage: dict[str, JudgeUsage] = {}

    async def find(self, owner: str, keys: Sequence[str]) -> Mapping[str, Judgement]:
        return {key: self._kept[owner, key] for key in keys if (owner, key) in self._kept}

    async def reserve(self, owner: str, budget: JudgeBudget) -> str | None:
        used = await self.usage(owner)
        limits = (
            (budget.max_calls, used.calls),
            (budget.max_tokens, used.tokens),
            (budget.max_usd, used.usd),
        )
        if any(most is not None and so_far >= most for most, so_far in limits):
            return used_up(used, budget)
        self._usage[owner] = used + JudgeUsage(calls=1)
        return None

    async def spend(self, owner: str, usage: JudgeUsage) -> None:
        spent = usage.model_copy(update={"calls": 0})
        self._usage[owner] = await self.usage(owner) + spent

    async def record(self, owner: str, key: str, judgement: Judgement) -> Judgement:
        return self._kept.setdefault((owner, key), judgement)

    async def usage(self, owner: str) -> JudgeUsage:
        return self._usage.get(owner, JudgeUsage())
