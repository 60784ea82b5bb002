"""Reads the facts from which `infra/readmodel/wait_reasons.py` derives what a run, or the platform,
waits for."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from infra.readmodel.disks import place_of
from infra.readmodel.wait_reasons import (
    BrokerFact,
    EffectFact,
    Facts,
    HolderFact,
    LetterFact,
    NewerEventFact,
    NewerRunFact,
    QuotaFact,
    StepFact,
    WorkerFact,
)
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.events import EVENT_TYPES
from schemas.ids import GroupKey, Purpose, run_stream

FULL_BYTES = 16 << 20
"""A disk with less free space than this has no room for the next write of Postgres or a checkpoint."""

SQL = queries("infra/readmodel/read_model.sql")

Fact = TypeVar("Fact")


class Waits:
    """Queries for what a run waits for."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def facts(
        self,
        run: str | None,
        *,
        kafka_behind: int | None = None,
        directories: Iterable[Path] = (),
        most_samples: int | None = None,
    ) -> Facts:
        """The facts about a run, or with None about every run that is not paused. `kafka_behind` counts
        the events that are not published, where Kafka is the bus. `directories` are those whose disks
        are checked. `most_samples` may be in flight for a workspace that has no limit of its own."""
        row = await self._pool.fetchrow(SQL["facts"], run, run_stream(run) if run else None)
        holders = await self.holders() if row["hidden"] else ()
        effects = [_effect(document) for document in _documents(row["effects"])]
        undecided = tuple(json.loads(row["undecided"] or "[]"))
        broker = None if kafka_behind is None else BrokerFact(row["seen_s"], kafka_behind)
        return Facts(
            gate=row["gate"] or "open",
            letters=_many(LetterFact, row["letters"]),
            effects=effects,
            sampled=await self._count_sampled(run, effects),
            workers=[
                WorkerFact(**{**worker, "lanes": tuple(worker["lanes"])})
                for worker in _documents(row["workers"])
            ],
            holders=holders,
            hidden=row["hidden"],
            undecided=undecided,
            newer=_many(NewerRunFact, row["newer"]),
            unknown=await self._first_unknown(run) if undecided or run is None else None,
            broker=broker,
            full=[str(directory) for directory in directories if _is_full(directory)],
            quota=await self._full_quota(run, effects, most_samples),
        )

    async def _full_quota(
        self, run: str | None, effects: Iterable[EffectFact], most_samples: int | None
    ) -> QuotaFact | None:
        """The quota for which the next sample of a run waits."""
        if run is None or not any(e.lane == "generate" and e.worker is None for e in effects):
            return None
        row = await self._pool.fetchrow(SQL["full_quota"], run, most_samples)
        return QuotaFact(int(row["used"]), row["most"]) if row else None

    async def _count_sampled(
        self, run: str | None, effects: Iterable[EffectFact]
    ) -> StepFact | None:
        """The oldest step of a run whose samples are being made."""
        steps = [one.step for one in effects if one.step is not None]
        row = (
            await self._pool.fetchrow(SQL["step_samples"], run, min(steps))
            if run and steps
            else None
        )
        return StepFact(min(steps), row["graded"], row["total"]) if row else None

    async def _first_unknown(self, run: str | None) -> NewerEventFact | None:
        """The first event that this release does not know, of a run or of anything, for example of a
        workspace. It reads the history of the run, so it is looked for only in a run that has stood for
        a while."""
        if run is None:
            row = await self._pool.fetchrow(SQL["first_newer_event"])
            return NewerEventFact(**dict(row)) if row else None
        versions = [kind.version for kind in EVENT_TYPES.values()]
        row = await self._pool.fetchrow(
            SQL["first_unknown_event"], run, list(EVENT_TYPES), versions
        )
        return NewerEventFact(**dict(row)) if row else None

    async def holders(self) -> tuple[HolderFact, ...]:
        """The transactions that hold the log's horizon back, the oldest first."""
        return tuple(
            HolderFact(**dict(row)) for row in await self._pool.fetch(SQL["horizon_holders"])
        )


def _documents(text: str | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text or "[]")
    return found


def _effect(document: dict[str, Any]) -> EffectFact:
    group = document.pop("group", None)
    key = GroupKey.parse(group) if group else None
    step = key.step if key is not None and key.purpose == Purpose.TRAIN else None
    return EffectFact(**document, step=step)


def _many(kind: type[Fact], text: str | None) -> list[Fact]:
    return [kind(**document) for document in _documents(text)]


def _is_full(directory: Path) -> bool:
    place = place_of(directory)
    return place is not None and shutil.disk_usage(place).free < FULL_BYTES
