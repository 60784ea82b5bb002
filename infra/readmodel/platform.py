"""The platform's own state, for `headrace status` and the API: workers, effects, lag, doors."""

from dataclasses import dataclass
from datetime import datetime
from typing import TypedDict

from infra.postgres.pool import Database
from schemas.ids import WorkerId

COUNTED = 1000
"""What lies above a cursor is counted so far; these questions are asked every few seconds."""

ABOVE = """
(select case when c.above < $1 then c.above else greatest(c.above, coalesce((select position
    from events order by xid desc, position desc limit 1), 0) - {mark}.position) end
 from (select count(*) as above from (select from events e
       where (e.xid, e.position) > ({mark}.xid, {mark}.position)
       order by e.xid, e.position limit $1) found) c)
"""


class WorkerJson(TypedDict):
    id: str
    host: str
    pid: int
    lanes: list[str]
    expires_in_s: float


class LaneJson(TypedDict):
    waiting: int
    claimed: int


class BusJson(TypedDict):
    """`kind` log: the embedded bus, and nothing else is said. `relay_behind`: events not published;
    `seen_s`: since when the broker was not seen; `lag`: per group, records not acknowledged."""

    kind: str
    relay_behind: int
    seen_s: float | None
    lag: dict[str, int]
    skipped: dict[str, int]


@dataclass(frozen=True, slots=True)
class Door:
    """Where a device worker samples for the API (`checkpoint chat`)."""

    worker: str
    url: str
    key: str


class Platform:
    """Queries over the spine's tables."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def alive(self) -> datetime:
        """The database's clock. Raises what asyncpg raises when it is away."""
        now: datetime = await self._pool.fetchval("select clock_timestamp()")
        return now

    async def workers(self) -> list[WorkerJson]:
        """Workers with a live lease."""
        rows = await self._pool.fetch(
            "select id, host, pid, lanes,"
            " extract(epoch from expires_at - clock_timestamp())::float8 as remaining"
            " from workers where expires_at > clock_timestamp() order by started_at"
        )
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
        """Effects per lane: claimed under a live lease, or waiting."""
        rows = await self._pool.fetch(
            "select lane, count(*) filter (where w.id is not null) as claimed, count(*) as total"
            " from effects e left join workers w"
            " on w.id = e.worker and w.expires_at > clock_timestamp() group by lane"
        )
        return {
            row["lane"]: LaneJson(waiting=row["total"] - row["claimed"], claimed=row["claimed"])
            for row in rows
        }

    async def oldest_waiting_s(self) -> float:
        """The age of the oldest effect that is due, whose run does not rest, and that nobody holds."""
        age = await self._pool.fetchval(
            "select extract(epoch from clock_timestamp() - min(e.due_at))::float8 from effects e"
            " where e.due_at <= clock_timestamp() and not e.shut and not exists (select from workers w"
            " where w.id = e.worker and w.expires_at > clock_timestamp())"
        )
        return float(age or 0.0)

    async def lag(self) -> dict[str, int]:
        """Consumer -> events of the log above its watermark: counted up to `COUNTED`, and beyond that as
        many as positions were given since (a transaction that was rolled back leaves a gap)."""
        rows = await self._pool.fetch(
            f"select w.consumer, {ABOVE.format(mark='w')} as lag from watermarks w",  # noqa: S608 - constants
            COUNTED,
        )
        return {row["consumer"]: row["lag"] for row in rows}

    async def bus(self, kind: str) -> BusJson:
        """What stands between the log and the consumers."""
        lags = await self._pool.fetch("select consumers, records from bus_lag order by consumers")
        skips = await self._pool.fetch("select reason, count from bus_skips order by reason")
        relay = await self._pool.fetchrow(
            "select extract(epoch from clock_timestamp() - r.seen_at)::float8 as seen_s,"  # noqa: S608 - constants
            f" {ABOVE.format(mark='r')} as behind from relay r",
            COUNTED,
        )
        return BusJson(
            kind=kind,
            relay_behind=relay["behind"] if relay else 0,
            seen_s=round(relay["seen_s"], 1) if relay else None,
            lag={row["consumers"]: row["records"] for row in lags},
            skipped={row["reason"]: row["count"] for row in skips},
        )

    async def horizon_age_s(self) -> float:
        """Since when the oldest writing transaction of our database holds the log's horizon back."""
        age = await self._pool.fetchval("select horizon_age_s()")
        return float(age or 0.0)

    async def step_metrics(self) -> list[tuple[str, str, float]]:
        """(run, key, value) of the last step of each run that is running."""
        rows = await self._pool.fetch(
            "select r.name, m.key, m.value from runs r join metric_points m"
            " on m.run = r.run and m.step = r.current_step where r.status = 'running'"
            " and (m.key like 'time/%' or m.key in ('train/lag', 'rollout/raw_reward'))"
        )
        return [(row["name"], row["key"], row["value"]) for row in rows]

    async def tokens_per_s(self, *, steps: int = 10) -> dict[str, float]:
        """Run -> generated tokens that it trained on, per second over its last so many steps."""
        rows = await self._pool.fetch(
            "with recent as (select r.name, m.step, m.value, m.at,"
            " min(m.step) over (partition by r.run) as first from runs r join metric_points m"
            " on m.run = r.run and m.key = 'rollout/tokens' and m.step > r.current_step - $1"
            " where r.status = 'running')"
            " select name, sum(value) filter (where step > first)"
            " / extract(epoch from max(at) - min(at))::float8 as rate from recent"
            " group by name having max(at) > min(at)",
            steps,
        )
        return {row["name"]: row["rate"] for row in rows}

    async def run_counts(self) -> dict[str, int]:
        """Status -> runs."""
        rows = await self._pool.fetch("select status, count(*) from runs group by status")
        return {row["status"]: row["count"] for row in rows}


class Doors:
    """Where device workers answer the API."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def announce(self, worker: WorkerId, url: str, key: str) -> None:
        await self._pool.execute(
            "insert into worker_doors (worker, url, key) values ($1, $2, $3)"
            " on conflict (worker) do update set url = excluded.url, key = excluded.key,"
            " updated_at = clock_timestamp()",
            worker,
            url,
            key,
        )
        await self._pool.execute(
            "delete from worker_doors d where not exists (select from workers w"
            " where w.id = d.worker) and updated_at < clock_timestamp() - interval '1 hour'"
        )

    async def open(self) -> list[Door]:
        """The doors of workers with a live lease, the newest first."""
        rows = await self._pool.fetch(
            "select d.worker, d.url, d.key from worker_doors d join workers w on w.id = d.worker"
            " where w.expires_at > clock_timestamp() order by d.updated_at desc"
        )
        return [Door(row["worker"], row["url"], row["key"]) for row in rows]
