"""The platform's own state, for `headrace status` and the API: workers, effects, lag."""

from collections.abc import Mapping
from datetime import datetime
from typing import TypedDict

from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

SQL = queries("infra/readmodel/read_model.sql")

COUNTED = 1000
"""Up to how many events above a cursor are counted; this is asked every few seconds."""

MOST_WAITING = 10_000
"""Up to how many waiting effects of a lane are counted."""


class WorkerJson(TypedDict):
    id: str
    host: str
    pid: int
    lanes: list[str]
    expires_in_s: float


class LaneJson(TypedDict):
    """`waiting` is counted up to `MOST_WAITING`. `oldest_s` is how long the oldest effect waits of those
    that are next in their queue; None without one."""

    waiting: int
    claimed: int
    oldest_s: float | None


class BusJson(TypedDict):
    """`kind` is "log" for the embedded bus, which has none of the other facts. `relay_behind` counts the
    events that are not published, `seen_s` is how long ago the broker was last seen, and `lag` counts
    the records that each group has not acknowledged."""

    kind: str
    relay_behind: int
    seen_s: float | None
    lag: dict[str, int]
    skipped: dict[str, int]


def oldest_waiting_s(lanes: Mapping[str, LaneJson]) -> float:
    """Return how long the oldest effect waits of those that are next in their queue."""
    return max((lane["oldest_s"] or 0.0 for lane in lanes.values()), default=0.0)


class PlatformState:
    """Queries over workers, effects, the bus and the horizon."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def alive(self) -> datetime:
        """The database's clock. Raises DatabaseUnavailable when it does not answer."""
        now: datetime = await self._pool.fetchval(SQL["clock_time"])
        return now

    async def workers(self) -> list[WorkerJson]:
        """Workers with a live lease."""
        rows = await self._pool.fetch(SQL["workers"])
        return [
            WorkerJson(
                id=row["id"],
                host=row["host"],
                pid=row["pid"],
                lanes=list(row["lanes"]),
                expires_in_s=round(row["remaining"], 2),
            )
            for row in rows
        ]

    async def effects(self) -> dict[str, LaneJson]:
        """Effects per lane: claimed under a live lease, or waiting. What waits for a paused or held run
        does not count."""
        rows = await self._pool.fetch("select * from count_effects($1)", MOST_WAITING)
        return {
            row["r_lane"]: LaneJson(
                waiting=row["r_waiting"], claimed=row["r_claimed"], oldest_s=row["r_oldest_s"]
            )
            for row in rows
        }

    async def database_bytes(self) -> int:
        """The size of the database on its disk."""
        size: int = await self._pool.fetchval(SQL["database_size"])
        return size

    async def lag(self) -> dict[str, int]:
        """Consumer -> events of the log above its watermark. They are counted up to `COUNTED`; a larger
        number is the difference of positions, and includes the gaps of transactions that were rolled
        back."""
        rows = await self._pool.fetch(
            SQL["lag"],
            COUNTED,
        )
        return {row["consumer"]: row["lag"] for row in rows}

    async def bus(self, kind: str) -> BusJson:
        """The bus between the log and the consumers."""
        lags = await self._pool.fetch(SQL["bus_lag"])
        skips = await self._pool.fetch(SQL["bus_skips"])
        relay = await self._pool.fetchrow(SQL["relay"], COUNTED)
        return BusJson(
            kind=kind,
            relay_behind=relay["behind"] if relay else 0,
            seen_s=round(relay["seen_s"], 1) if relay else None,
            lag={row["consumers"]: row["records"] for row in lags},
            skipped={row["reason"]: row["count"] for row in skips},
        )

    async def horizon_age_s(self) -> float:
        """How long the oldest writing transaction of our database has held the log's horizon back."""
        age = await self._pool.fetchval(SQL["horizon_age_s"])
        return float(age or 0.0)

    async def step_metrics(self) -> list[tuple[str, str, float]]:
        """(run, key, value) of the last step of each run that is running."""
        rows = await self._pool.fetch(SQL["metrics_of_last_steps"])
        return [(row["name"], row["key"], row["value"]) for row in rows]

    async def tokens_per_s(self, *, steps: int = 10) -> dict[str, float]:
        """Run -> generated tokens that it trained on, per second over its last `steps` steps."""
        rows = await self._pool.fetch(
            SQL["tokens_per_s"],
            steps,
        )
        return {row["name"]: row["rate"] for row in rows}

    async def run_counts(self) -> dict[str, int]:
        """Status -> runs."""
        rows = await self._pool.fetch(SQL["count_runs_by_status"])
        return {row["status"]: row["count"] for row in rows}
