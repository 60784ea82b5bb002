"""Claims and leases on Postgres: they record which worker performs which effect, under which epoch.

A lease belongs to a worker, not to an effect. No statement here waits for the disk. If a power cut loses
a claim, the effect is claimed again under another epoch.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import asyncpg

from infra.spine.ports.effects import Claimed, Holding, StaleGeneration
from infra.spine.postgres.pool import Database
from schemas.effects.effect import Lane
from schemas.envelope import decode_effect
from schemas.events.decider_version import DECIDER_VERSION
from schemas.ids import ConsumerName, EffectId, StreamName, WorkerId
from schemas.text import plain

CRASH_LIMIT = 20
"""For how many deaths of workers an effect may be blamed before it ends as a crash."""


class PostgresEffects:
    """`Effects` for one worker at a time on Postgres. A registered lease survives a crash of the
    database, but the last renewals and claims may be lost."""

    def __init__(self, database: Database, *, decider: int = DECIDER_VERSION) -> None:
        self._decider = decider
        self._pool = database.lazy
        self._durable = database.durable
        self.history = database.history

    async def register(
        self,
        worker: WorkerId,
        *,
        host: str,
        pid: int,
        lease_s: float,
        lanes: Sequence[Lane] = (),
    ) -> None:
        await self._durable.execute(
            "insert into workers (id, host, pid, lanes, expires_at, decider)"
            " values ($1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5), $6)"
            " on conflict (id) do update set expires_at = excluded.expires_at",
            worker,
            host,
            pid,
            [str(lane) for lane in lanes],
            lease_s,
            self._decider,
        )
        # These effects were requested by a transaction that did not yet see that another one closed
        # the run.
        await self._pool.execute(
            "delete from effects e using run_gates g"
            " where g.run_id = e.run_id and g.state = 'closed'"
        )
        await self._pool.execute(
            "delete from workers w where expires_at < clock_timestamp() - interval '1 hour'"
            " and not exists (select from effects e where e.worker = w.id)"
        )

    async def renew(self, worker: WorkerId, *, lease_s: float) -> bool:
        status = await self._pool.execute(
            "update workers set expires_at = clock_timestamp() + make_interval(secs => $2)"
            " where id = $1 and expires_at > clock_timestamp()",
            worker,
            lease_s,
        )
        return bool(status == "UPDATE 1")

    async def expire(self, worker: WorkerId) -> None:
        await self._pool.execute(
            "update workers set expires_at = least(expires_at, clock_timestamp()) where id = $1",
            worker,
        )

    async def claim(
        self,
        worker: WorkerId,
        *,
        room: Mapping[Lane, int],
        consumers: Sequence[ConsumerName],
        generation: int = 0,
        most: Mapping[Lane, int] | None = None,
        samples: int | None = None,
        spare: Mapping[Lane, int] | None = None,
    ) -> Sequence[Claimed]:
        try:
            rows = await self._pool.fetch(
                "select * from claim_in_turn($1, $2, $3, $4, $5, $6, $7, $8)",
                worker,
                [str(lane) for lane in room],
                list(consumers),
                list(room.values()),
                generation,
                [most.get(lane) for lane in room] if most else None,
                samples,
                [spare.get(lane, 0) for lane in room] if spare else None,
            )
        except asyncpg.PostgresError as error:
            if error.sqlstate == "HR003":
                raise StaleGeneration(worker, generation) from error
            raise
        return [
            _claim_in(row) for row in sorted(rows, key=lambda row: (row["turn"], row["created"]))
        ]

    async def retry(
        self,
        claimed: Claimed,
        *,
        delay_s: float,
        error: str,
        counted: bool = True,
        wasted_s: float = 0.0,
    ) -> None:
        await self._pool.execute(
            "update effects set worker = null, attempts = attempts + $5, error = $3,"
            " wasted_s = wasted_s + $6,"
            " due_at = clock_timestamp() + make_interval(secs => $4), later = $4 > 0"
            " where id = $1 and epoch = $2",
            claimed.id,
            claimed.epoch,
            plain(error[:2000]),
            delay_s,
            int(counted),
            wasted_s,
        )

    async def release(self, claimed: Claimed, *, wasted_s: float = 0.0) -> None:
        await self._pool.execute(
            "update effects set worker = null, wasted_s = wasted_s + $3 where id = $1 and epoch = $2",
            claimed.id,
            claimed.epoch,
            wasted_s,
        )

    async def holding(self, worker: WorkerId) -> Holding:
        rows = await self._pool.fetch(
            "select w.generation, e.id, e.epoch from workers w"
            " left join effects e on e.worker = w.id where w.id = $1",
            worker,
        )
        claims = {EffectId(row["id"]): row["epoch"] for row in rows if row["id"] is not None}
        return Holding(rows[0]["generation"] if rows else 0, claims)

    async def disown(
        self, worker: WorkerId, *, generation: int, keep: Sequence[EffectId]
    ) -> int | None:
        raised: int | None = await self._pool.fetchval(
            "select disown_effects($1, $2, $3)", worker, generation, list(keep)
        )
        return raised

    async def gates(self, run_ids: Sequence[str]) -> Mapping[str, str]:
        rows = await self._pool.fetch(
            "select run_id, case when state = 'open' and holds > 0 then 'paused' else state end"
            " as state from run_gates where run_id = any ($1)",
            list(run_ids),
        )
        return {row["run_id"]: row["state"] for row in rows}

    async def runs_of_newer(self, run_ids: Collection[str]) -> frozenset[str]:
        rows = await self._pool.fetch(
            "select run_id from run_gates where run_id = any ($1) and decider > $2",
            list(run_ids),
            self._decider,
        )
        return frozenset(row["run_id"] for row in rows)

    async def next_due_s(
        self, worker: WorkerId, *, lanes: Sequence[Lane], consumers: Sequence[ConsumerName]
    ) -> float | None:
        # One index lookup per queue, because a plain min() would read all waiting effects. And one
        # lookup per worker that holds effects: which ones it holds matters only after its lease expires.
        seconds = await self._pool.fetchval(
            "select extract(epoch from least((select min(head.due_at)"
            " from unnest($1::text[]) l (lane) cross join unnest($2::text[]) n (consumer)"
            " cross join lateral (select e.due_at from effects e where e.worker is null"
            " and not e.shut and e.later and e.lane = l.lane and e.consumer = n.consumer"
            " and e.due_at > (select clock_timestamp()) order by e.due_at limit 1) head),"
            " (select min(w.expires_at) from workers w where w.id <> $3"
            " and w.expires_at > clock_timestamp()"
            " and exists (select from effects e where e.worker = w.id))) - clock_timestamp())",
            [str(lane) for lane in lanes],
            list(consumers),
            worker,
        )
        return None if seconds is None else float(seconds)

    async def has_unfinished(
        self, *, lanes: Sequence[Lane], consumers: Sequence[ConsumerName]
    ) -> bool:
        found: bool = await self._pool.fetchval(
            "select has_unfinished($1, $2, $3)",
            [str(lane) for lane in lanes],
            list(consumers),
            self._decider,
        )
        return found


def _claim_in(row: Any) -> Claimed:
    return Claimed(
        id=EffectId(row["id"]),
        effect=decode_effect(row["type"], row["data"]),
        consumer=ConsumerName(row["consumer"]),
        stream=StreamName(row["stream"]),
        epoch=row["epoch"],
        attempts=row["attempts"],
        crashes=row["crashes"],
        correlation=row["correlation"],
        traceparent=row["traceparent"],
        spent=row["crashes"] > CRASH_LIMIT,
        size=row["size"],
        wasted_s=row["wasted_s"],
    )
