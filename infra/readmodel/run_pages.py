"""Pages of the list of runs. A page of the API begins at an offset. One of the dashboard begins at the
place of a run, so runs that arrive meanwhile move nothing, and the last page costs as much as the
first."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, cast

from infra.ports.actor import visible_workspaces
from infra.readmodel.runs import PageRange, RunJson, escape_like
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

SQL = queries("infra/readmodel/read_model.sql")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
SEPARATOR = "\0"
"""The parts of a cursor are separated by what no text in the database holds."""

LONGEST_CURSOR = 4096
PAUSED = "paused"
"""Selects the running runs that are paused."""


RunOrder = Literal["newest", "oldest", "reward", "name"]


@dataclass(frozen=True, slots=True)
class _Direction:
    """The parts of a query that read the list in one direction: its order, and what is beyond a
    place."""

    order: str
    beyond: str


DIRECTIONS: Mapping[str, tuple[_Direction, _Direction]] = {
    "newest": (
        _Direction("newest_first", "started_before"),
        _Direction("oldest_first", "started_after"),
    ),
    "oldest": (
        _Direction("oldest_first", "started_after"),
        _Direction("newest_first", "started_before"),
    ),
    "reward": (
        _Direction("best_first", "rewarded_less"),
        _Direction("worst_first", "rewarded_more"),
    ),
    "name": (
        _Direction("by_name", "named_later"),
        _Direction("by_name_reversed", "named_earlier"),
    ),
}
ORDERS: tuple[RunOrder, ...] = ("newest", "oldest", "reward", "name")
"""The orders of a list of runs."""


@dataclass(frozen=True, slots=True)
class RunKind:
    """The exact names, the tag and the project by which a list of runs is narrowed. None selects any."""

    dataset: str | None = None
    model: str | None = None
    rollout: str | None = None
    workspace: str | None = None
    creator: str | None = None
    tag: str | None = None
    project: str | None = None


ANY_KIND = RunKind()


@dataclass(frozen=True, slots=True)
class RunFilter:
    """The runs that a list shows. `archived` selects those that were archived instead of the others."""

    status: str | None = None
    search: str | None = None
    archived: bool = False
    kind: RunKind = ANY_KIND


ALL_RUNS = RunFilter()


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The place of a run in a list: what the list was sorted by when it showed the run. A run that has
    another reward or name since then does not move the place."""

    order: RunOrder
    created_at: datetime
    run: str
    reward: float | None = None
    name: str | None = None

    @classmethod
    def of(cls, run: RunJson, order: RunOrder) -> "RunPlace":
        """Return the place of a run in the list of this order."""
        return cls(
            order,
            run["created_at"],
            run["id"],
            reward=run["reward"] if order == "reward" else None,
            name=run["name"] if order == "name" else None,
        )

    @property
    def cursor(self) -> str:
        """The place as text for an address: letters, digits, `-` and `_`."""
        parts = [self.order, str((self.created_at - EPOCH) // MICROSECOND), self.run]
        if self.reward is not None:
            parts.append(repr(self.reward))
        if self.name is not None:
            parts.append(self.name)
        content = SEPARATOR.join(parts).encode()
        return base64.urlsafe_b64encode(content).decode().rstrip("=")

    @classmethod
    def parse(cls, cursor: str, *, order: RunOrder) -> "RunPlace":
        """Return the place of a cursor. Raises ValueError when the text is not a cursor that a list in
        this order made."""
        if len(cursor) > LONGEST_CURSOR:
            raise ValueError("too long")
        content = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        made_for, start, run, *values = content.decode().split(SEPARATOR)
        if made_for != order or len(values) > 1:
            raise ValueError("made for another order")
        try:
            created_at = EPOCH + int(start) * MICROSECOND
        except OverflowError as error:
            raise ValueError("a time that is out of range") from error
        value = values[0] if values else None
        place = cls(
            order,
            created_at,
            run,
            reward=float(value) if value is not None and order == "reward" else None,
            name=value if order == "name" else None,
        )
        # Only one text is the cursor of a place, and a list by name has no place without one.
        if place.cursor != cursor or (order == "name") != (place.name is not None):
            raise ValueError("not made by a list of runs")
        return place


@dataclass(frozen=True, slots=True)
class RunPage:
    """A page of the list. `first` is the number of its first run among all, from 1. `previous` and
    `following` are the places that the pages beside it end before and begin after; None without one."""

    runs: tuple[RunJson, ...]
    total: int
    first: int
    previous: RunPlace | None
    following: RunPlace | None


Segment = tuple[str, int, int]
"""A run, and the first and the last of some of its steps."""


class RunPages:
    """Queries for pages that show several runs."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def at_offset(
        self, page: PageRange, found: RunFilter = ALL_RUNS
    ) -> tuple[list[RunJson], int]:
        """A page of runs, the newest first, and how many there are in all."""
        parts, values = _selection(found)
        rows = await self._pool.fetch(
            SQL.variant("page_of_runs", **parts), *values, page.limit, page.offset
        )
        total = await self._pool.fetchval(SQL.variant("count_runs", **parts), *values)
        return [cast(RunJson, dict(row)) for row in rows], int(total)

    async def at_place(
        self,
        order: RunOrder,
        *,
        limit: int,
        found: RunFilter = ALL_RUNS,
        after: RunPlace | None = None,
        before: RunPlace | None = None,
    ) -> RunPage:
        """The runs right after a place of a list in this order, or those right before one, or the first
        ones without a place. At most one place is given, of the same order."""
        place, direction = after or before, DIRECTIONS[order][1 if before else 0]
        parts, values = _selection(found)
        parts["place"] = direction.beyond if place else "at_any_place"
        key = (place.created_at, place.run, place.reward, place.name) if place else (None,) * 4
        rows = await self._pool.fetch(
            SQL.variant("runs_beyond", **parts, order=direction.order), *values, *key, limit + 1
        )
        counts = await self._pool.fetchrow(SQL.variant("count_runs_beyond", **parts), *values, *key)
        runs = [cast(RunJson, dict(row)) for row in rows[:limit]]
        passed = counts["total"] - counts["beyond"]
        is_more_beyond, is_more_behind = len(rows) > limit, passed > 0
        if before:
            runs.reverse()
            passed = counts["beyond"] - len(runs)
            is_more_beyond, is_more_behind = is_more_behind, is_more_beyond
        return RunPage(
            runs=tuple(runs),
            total=counts["total"],
            first=max(0, passed) + 1,  # the runs were counted a moment later
            previous=RunPlace.of(runs[0], order) if runs and is_more_behind else None,
            following=RunPlace.of(runs[-1], order) if runs and is_more_beyond else None,
        )

    async def forks(self, run: str, page: PageRange) -> tuple[list[RunJson], int]:
        """A page of the forks of a run (its id), the oldest first, and how many there are in all."""
        visible = visible_workspaces()
        rows = await self._pool.fetch(SQL["page_of_forks"], run, visible, page.limit, page.offset)
        total = await self._pool.fetchval(SQL["count_forks"], run, visible)
        return [cast(RunJson, dict(row)) for row in rows], int(total)

    async def differing_metrics(
        self, a: Sequence[Segment], b: Sequence[Segment], keys: Sequence[str]
    ) -> dict[str, int]:
        """The first step at which metrics of two histories differ, of those steps that both have. A
        metric that never differs is absent."""
        places = [[one[n] for one in side] for side in (a, b) for n in range(3)]
        rows = await self._pool.fetch(SQL["differing_metrics"], *places, list(keys))
        return {row["key"]: row["step"] for row in rows}


def _status_part(status: str | None) -> str:
    if status == PAUSED:
        return "paused"
    return "with_status" if status else "with_any_status"


def _selection(found: RunFilter) -> tuple[dict[str, str], tuple[object, ...]]:
    """The parts of a query that select these runs, and its first arguments."""
    workspaces, kind = visible_workspaces(), found.kind
    parts = {
        "status": _status_part(found.status),
        "archived": "archived" if found.archived else "present",
        "words": "with_words" if found.search else "with_any_words",
        "reach": "of_any_workspace" if workspaces is None else "of_workspace",
        "kind": "of_any_kind" if kind == ANY_KIND else "narrowed",
    }
    pattern = f"%{escape_like(found.search)}%" if found.search else None
    of_run = (kind.dataset, kind.model, kind.rollout, kind.workspace)
    names = (*of_run, kind.creator, kind.tag, kind.project)
    return parts, (found.status, pattern, workspaces, *names)
