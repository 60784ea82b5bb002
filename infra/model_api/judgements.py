"""Judgements and the usage of judges on Postgres, in the tables `judgements` and `judge_usage`, and in
memory.

They bridge the time until a group's grades are in the log, and count what a run may use. A run that is
deleted or archived takes its rows with it.
"""

from collections.abc import Mapping, Sequence

from infra.spine.postgres.pool import Database
from schemas.sampling import Judgement, JudgeUsage
from schemas.specs import JudgeBudget

FIND = "select key, judgement from judgements where owner = $1 and key = any($2)"

RESERVE = (
    "insert into judge_usage as u (owner, calls) values ($1, 1)"
    " on conflict (owner) do update set calls = u.calls + 1"
    " where u.calls < coalesce($2, u.calls + 1)"
    " and u.tokens < coalesce($3, u.tokens + 1) and u.usd < coalesce($4, u.usd + 1)"
    " returning calls"
)

SPEND = (
    "insert into judge_usage as u (owner, tokens, usd) values ($1, $2, $3)"
    " on conflict (owner) do update set tokens = u.tokens + excluded.tokens,"
    " usd = u.usd + excluded.usd"
)

RECORD = (
    "insert into judgements as j (owner, key, judgement)"
    " select $1, k, v from unnest($2::text[], $3::text[]) as made (k, v) order by k"
    " on conflict (owner, key) do update set judgement = j.judgement returning key, judgement"
)


class PostgresJudgements:
    """`infra.ports.judges.JudgementRecord` on Postgres."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def find_judgements(self, owner: str, keys: Sequence[str]) -> Mapping[str, Judgement]:
        rows = await self._pool.fetch(FIND, owner, list(keys))
        return {row["key"]: Judgement.model_validate_json(row["judgement"]) for row in rows}

    async def reserve(self, owner: str, budget: JudgeBudget) -> str | None:
        limits = (budget.max_calls, budget.max_tokens, budget.max_usd)
        if await self._pool.fetchval(RESERVE, owner, *limits) is not None:
            return None
        return used_up(await self.usage(owner), budget)

    async def spend(self, owner: str, usage: JudgeUsage) -> None:
        await self._pool.execute(SPEND, owner, usage.tokens, usage.usd)

    async def record(
        self, owner: str, judgements: Mapping[str, Judgement]
    ) -> Mapping[str, Judgement]:
        values = [judgement.model_dump_json() for judgement in judgements.values()]
        rows = await self._pool.fetch(RECORD, owner, list(judgements), values)
        return {row["key"]: Judgement.model_validate_json(row["judgement"]) for row in rows}

    async def usage(self, owner: str) -> JudgeUsage:
        row = await self._pool.fetchrow(
            "select calls, tokens, usd from judge_usage where owner = $1", owner
        )
        return JudgeUsage() if row is None else JudgeUsage.model_validate(dict(row))


def used_up(usage: JudgeUsage, budget: JudgeBudget) -> str:
    """Return which part of a budget is used up, as the beginning of a sentence."""
    if budget.max_calls is not None and usage.calls >= budget.max_calls:
        return f"{usage.calls} requests to judges, all that advanced.judge_max_calls allows"
    if budget.max_tokens is not None and usage.tokens >= budget.max_tokens:
        return f"{usage.tokens} tokens of judges, all that advanced.judge_max_tokens allows"
    return f"{usage.usd:.2f} US dollars for judges, all that advanced.judge_max_usd allows"


class MemoryJudgements:
    """`infra.ports.judges.JudgementRecord` in memory."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Judgement] = {}
        self._usage: dict[str, JudgeUsage] = {}

    async def find_judgements(self, owner: str, keys: Sequence[str]) -> Mapping[str, Judgement]:
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

    async def record(
        self, owner: str, judgements: Mapping[str, Judgement]
    ) -> Mapping[str, Judgement]:
        return {key: self._kept.setdefault((owner, key), new) for key, new in judgements.items()}

    async def usage(self, owner: str) -> JudgeUsage:
        return self._usage.get(owner, JudgeUsage())
