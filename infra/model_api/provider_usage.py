"""The use that evaluations make of the models of providers, counted in the table
`provider_usage` or in memory."""

from infra.ports.provider_usage import why_refused
from infra.spine.postgres.pool import Database
from schemas.sampling import ProviderRef

BEGIN = (
    "insert into provider_usage as u (owner, calls) values ($1, 1)"
    " on conflict (owner) do update set calls = u.calls + 1"
    " where u.calls < $2 and u.usd < coalesce($3, u.usd + 1)"
    " returning calls"
)

SPEND = (
    "insert into provider_usage as u (owner, usd) values ($1, $2)"
    " on conflict (owner) do update set usd = u.usd + excluded.usd"
)


class PostgresProviderUsage:
    """`infra.ports.provider_usage.ProviderUsage` on Postgres."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def begin(self, provider: ProviderRef) -> str | None:
        owner, most_calls, most_usd = provider.owner, provider.max_calls, provider.max_usd
        if await self._pool.fetchval(BEGIN, owner, most_calls, most_usd) is not None:
            return None
        row = await self._pool.fetchrow(
            "select calls, usd from provider_usage where owner = $1", owner
        )
        calls, usd = (row["calls"], row["usd"]) if row is not None else (0, 0.0)
        return why_refused(provider, calls=calls, usd=usd)

    async def spend(self, owner: str, usd: float) -> None:
        await self._pool.execute(SPEND, owner, usd)


class MemoryProviderUsage:
    """`infra.ports.provider_usage.ProviderUsage` in memory."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._usd: dict[str, float] = {}

    async def begin(self, provider: ProviderRef) -> str | None:
        calls, usd = self._calls.get(provider.owner, 0), self._usd.get(provider.owner, 0.0)
        is_dear = provider.max_usd is not None and usd >= provider.max_usd
        if calls >= provider.max_calls or is_dear:
            return why_refused(provider, calls=calls, usd=usd)
        self._calls[provider.owner] = calls + 1
        return None

    async def spend(self, owner: str, usd: float) -> None:
        self._usd[owner] = self._usd.get(owner, 0.0) + usd
