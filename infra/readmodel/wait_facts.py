"""The facts that say what a run, or the platform, waits for (`infra/readmodel/wait_reasons.py`), read
from the spine."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from infra.postgres.pool import Database
from infra.readmodel.wait_reasons import (
    BrokerFact,
    EffectFact,
    Facts,
    HolderFact,
    LetterFact,
    WorkerFact,
)
from schemas.ids import run_stream

MOST_EFFECTS = 200
FULL_BYTES = 16 << 20
"""A disk with less room than this cannot take the next write of Postgres or of a checkpoint."""

MINE = (
    "(e.run_id = $1 or"
    " (e.lane = 'control' and e.type = 'FetchCommit' and e.data ->> 'requester' = $2))"
)

UNDECIDED_S = 15
"""Watermarks move every few seconds: an event above one that is younger may have been consumed."""

FACTS = f"""
select
  (select case when g.state = 'open' and g.holds > 0 then 'paused' else g.state end
   from run_gates g where g.run_id = $1) as gate,
  (select json_agg(json_build_object('id', d.letter, 'consumer', d.consumer, 'cause', d.cause))
   from dead_letters d where d.pauses and d.redriven_at is null and ($1::text is null or d.about = $1))
   as letters,
  (select json_agg(json_build_object('type', e.type, 'lane', e.lane, 'worker', e.worker,
     'lease_s', e.lease_s, 'due_s', e.due_s, 'attempts', e.attempts, 'crashes', e.crashes,
     'error', e.error))
   from (select e.type, e.lane, e.worker, e.attempts, e.crashes, e.error,
           extract(epoch from w.expires_at - clock_timestamp())::float8 as lease_s,
           extract(epoch from e.due_at - clock_timestamp())::float8 as due_s
         from effects e left join workers w on w.id = e.worker
         where ($1::text is null and not e.shut) or {MINE}
         order by e.due_at limit {MOST_EFFECTS}) e) as effects,
  (select json_agg(json_build_object('id', w.id, 'host', w.host, 'pid', w.pid, 'lanes', w.lanes,
     'lease_s', extract(epoch from w.expires_at - clock_timestamp())::float8,
     'held', (select count(*) from effects e where e.worker = w.id)))
   from workers w where w.expires_at > clock_timestamp()) as workers,
  exists (select from events v where ($1::text is null or v.run_id = $1)
     and v.xid >= (select own_horizon(pg_current_snapshot()))) as hidden,
  (select json_agg(m.consumer order by m.consumer) from watermarks m,
     (select v.id, v.xid, v.position, v.time from events v where v.run_id = $1
      order by v.xid desc, v.position desc limit 1) last
   where (m.xid, m.position) < (last.xid, last.position) and m.consumer <> 'project'
     and last.time < clock_timestamp() - interval '{UNDECIDED_S} seconds'
     and not exists (select from inbox i where i.consumer = m.consumer and i.event_id = last.id))
   as undecided,
  (select extract(epoch from clock_timestamp() - r.seen_at)::float8 from relay r) as seen_s
"""  # noqa: S608 - constants

HOLDERS = """
select current_database()::text as database, username, pid, name, application, address,
  extract(epoch from clock_timestamp() - since)::float8 as since_s from horizon_holders()
"""

Fact = TypeVar("Fact")


class Waits:
    """Queries for what holds a run up."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def facts(
        self,
        run: str | None,
        *,
        kafka_behind: int | None = None,
        directories: Iterable[Path] = (),
    ) -> Facts:
        """The facts about a run; None: about all that is not at rest. `kafka_behind`: events that are
        not published where Kafka is the bus; `directories`: those whose disks are looked at."""
        row = await self._pool.fetchrow(FACTS, run, run_stream(run) if run else None)
        holders = await self.holders() if row["hidden"] else ()
        broker = None if kafka_behind is None else BrokerFact(row["seen_s"], kafka_behind)
        return Facts(
            gate=row["gate"] or "open",
            letters=_many(LetterFact, row["letters"]),
            effects=_many(EffectFact, row["effects"]),
            workers=[
                WorkerFact(**{**worker, "lanes": tuple(worker["lanes"])})
                for worker in _documents(row["workers"])
            ],
            holders=holders,
            hidden=row["hidden"],
            undecided=tuple(json.loads(row["undecided"] or "[]")),
            broker=broker,
            full=[str(directory) for directory in directories if _is_full(directory)],
        )

    async def holders(self) -> tuple[HolderFact, ...]:
        """The transactions that hold the log's horizon, the oldest first."""
        return tuple(HolderFact(**dict(row)) for row in await self._pool.fetch(HOLDERS))


def _documents(text: str | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text or "[]")
    return found


def _many(kind: type[Fact], text: str | None) -> list[Fact]:
    return [kind(**document) for document in _documents(text)]


def _is_full(directory: Path) -> bool:
    place = next((p for p in (directory, *directory.parents) if p.exists()), None)
    return place is not None and shutil.disk_usage(place).free < FULL_BYTES
