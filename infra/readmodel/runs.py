"""What the API reads about runs. A page costs the same however many runs there are."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict, cast

from infra.ports.event_log import Cursor
from infra.postgres.pool import Database

UNKNOWN_AFTER_S = 60
"""A running run without progress for so long, while no worker lives, has status unknown."""

STATUS = f"""case when r.status = 'running' and r.phase <> 'paused'
  and coalesce(r.last_at, r.created_at) < clock_timestamp() - interval '{UNKNOWN_AFTER_S} seconds'
  and not exists (select from workers where expires_at > clock_timestamp())
  then 'unknown' else r.status end"""

HELD = "from dead_letters d where d.about = r.run and d.pauses and d.redriven_at is null"
"""A run with such a letter waits, whatever its own events say."""

PHASE = f"""case when r.status in ('pending', 'running') and exists (select {HELD}) then 'paused'
  when r.status = 'running' and r.phase = 'train' and r.current_step >= r.total_steps
  then 'finalize' else r.phase end"""

ERROR = f"""case when r.status in ('pending', 'running') then coalesce(r.error, (select
  'held by dead letter ' || d.letter || ' of ' || d.consumer || ': ' || d.cause {HELD}
  order by d.created_at limit 1), (select 'waiting: ' || f.error from effects f
  where f.run_id = r.run and f.error is not null order by f.due_at desc limit 1)) else r.error end"""  # noqa: S608 - constants
"""Why it ended; of one that goes on, why it does not get on."""

SUMMARY = f"""r.run as id, r.name, {STATUS} as status, {PHASE} as phase, r.algorithm,
  r.execution_mode, r.model, r.dataset, r.rollout, r.workspace, r.commit_sha, r.current_step,
  r.total_steps, r.reward, r.created_at, r.started_at, r.completed_at, r.archived_at,
  {ERROR} as error"""


class RunJson(TypedDict):
    """A run as lists show it. `config` is JSON text, and only there for one run alone."""

    id: str
    name: str
    status: str
    phase: str
    algorithm: str
    execution_mode: str
    model: str
    dataset: str
    rollout: str | None
    workspace: str | None
    commit_sha: str | None
    current_step: int | None
    total_steps: int | None
    reward: float | None
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    archived_at: datetime | None
    error: str | None


class CheckpointJson(TypedDict):
    step: int
    ref: str
    reward: float | None
    uri: str
    manifest_sha256: str
    adapter_sha256: str
    created_at: datetime


class PointJson(TypedDict):
    step: int
    value: float
    at: datetime


class LogJson(TypedDict):
    timestamp: datetime
    level: str
    step: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Page:
    limit: int = 50
    offset: int = 0


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A graded group; `first` is the position of its first sample among all that were asked for."""

    group: str
    step: int
    slot: int
    replacement: int
    dataset_row: int
    artifact: str
    grades: str
    first: int


class Runs:
    """Queries over runs and what belongs to them."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def page(
        self,
        page: Page,
        *,
        status: str | None = None,
        search: str | None = None,
        archived: bool = False,
    ) -> tuple[list[RunJson], int]:
        """The newest runs first, and how many there are in all: those that were archived, or the
        rest."""
        where = [f"({STATUS}) = $1"] if status else ["$1::text is null"]
        where.append(f"r.archived_at is {'not ' if archived else ''}null")
        if search:
            where.append("(r.name || ' ' || r.model || ' ' || r.dataset) ilike $2")
        else:
            where.append("$2::text is null")
        condition = " and ".join(where)
        pattern = f"%{_escaped(search)}%" if search else None
        rows = await self._pool.fetch(
            f"select {SUMMARY} from runs r where {condition}"  # noqa: S608 - constants
            " order by r.created_at desc, r.run limit $3 offset $4",
            status,
            pattern,
            page.limit,
            page.offset,
        )
        total = await self._pool.fetchval(
            f"select count(*) from runs r where {condition}",  # noqa: S608 - constants
            status,
            pattern,
        )
        return [cast(RunJson, dict(row)) for row in rows], int(total)

    async def ended_before(self, moment: datetime) -> list[RunJson]:
        """Runs that ended before `moment`, the oldest first, and were neither archived nor restored
        since; at most 1000."""
        rows = await self._pool.fetch(
            f"select {SUMMARY} from runs r where r.archived_at is null"  # noqa: S608 - constants
            " and greatest(r.completed_at, r.restored_at) < $1 order by r.completed_at limit 1000",
            moment,
        )
        return [cast(RunJson, dict(row)) for row in rows]

    async def get(self, ref: str) -> tuple[RunJson, str] | None:
        """A run by id or name, and its config as JSON text."""
        row = await self._pool.fetchrow(
            f"select {SUMMARY}, r.config from runs r where r.run = $1 or r.name = $1"  # noqa: S608 - constants
            " order by (r.run = $1) desc, r.created_at desc limit 1",
            ref,
        )
        if row is None:
            return None
        values = dict(row)
        config = values.pop("config")
        return cast(RunJson, values), config

    async def dataset_ref(self, run: str) -> str | None:
        """The run's dataset, a DatasetRef as JSON."""
        found: str | None = await self._pool.fetchval(
            "select dataset_ref from runs where run = $1", run
        )
        return found

    async def metrics(self, run: str) -> dict[str, list[PointJson]]:
        """Key -> points in order of step."""
        rows = await self._pool.fetch(
            "select key, step, value, at from metric_points where run = $1 order by key, step", run
        )
        found: dict[str, list[PointJson]] = {}
        for row in rows:
            point = PointJson(step=row["step"], value=row["value"], at=row["at"])
            found.setdefault(row["key"], []).append(point)
        return found

    async def checkpoints(self, run: str) -> list[CheckpointJson]:
        """In order of step."""
        rows = await self._pool.fetch(
            "select c.step, coalesce(r.name, c.run) || '@' || c.step as ref, c.reward, c.uri,"
            " c.manifest_sha256, c.adapter_sha256, c.created_at"
            " from checkpoints c left join runs r using (run) where c.run = $1 order by c.step",
            run,
        )
        return [cast(CheckpointJson, dict(row)) for row in rows]

    async def groups(
        self, owner: str, purpose: str, page: Page, *, step: int | None = None
    ) -> tuple[list[GroupRow], int]:
        """The groups that hold the samples of a page (a page counts samples), and all samples."""
        rows = await self._pool.fetch(
            "select *, sum(num_samples) over () as total from ("
            "  select step, slot, replacement, dataset_row, artifact, grades, num_samples,"
            "    sum(num_samples) over (order by step, slot, replacement) - num_samples as first"
            "  from graded_groups where owner = $1 and purpose = $2"
            "    and ($3::int is null or step = $3)"
            ") g order by first",
            owner,
            purpose,
            step,
        )
        total = int(rows[0]["total"]) if rows else 0
        end = page.offset + page.limit
        wanted = [
            row
            for row in rows
            if row["first"] < end and row["first"] + row["num_samples"] > page.offset
        ]
        return [_group(owner, purpose, row) for row in wanted], total

    async def num_groups(self, owner: str, purpose: str) -> int:
        """How many groups are graded."""
        count: int = await self._pool.fetchval(
            "select count(*) from graded_groups where owner = $1 and purpose = $2", owner, purpose
        )
        return count

    async def logs(
        self, run: str, *, limit: int, cursor: str | None = None, older: bool = True
    ) -> tuple[list[LogJson], str | None]:
        """A page of lines in the order of the log, and the cursor to go on from: without one the
        newest lines (older) or the first ones, else those beyond `cursor`. Raises ValueError when
        the cursor is not one."""
        at, line = _log_cursor(cursor, older=older)
        compare, order = ("<", "desc") if older else (">", "asc")
        rows = await self._pool.fetch(
            "select xid, position, line, at as timestamp, level, step, message from log_lines"  # noqa: S608 - constants
            f" where run = $1 and (xid, position, line) {compare} ($2, $3, $4)"
            f" order by xid {order}, position {order}, line {order} limit $5",
            run,
            at.xid,
            at.position,
            line,
            limit,
        )
        lines = [
            LogJson(
                timestamp=row["timestamp"],
                level=row["level"],
                step=row["step"],
                message=row["message"],
            )
            for row in (reversed(rows) if older else rows)
        ]
        if not rows:
            return lines, None if older else cursor
        last = rows[-1]
        following = f"{Cursor(last['xid'], last['position'])}-{last['line']:x}"
        return lines, None if older and len(rows) < limit else following


def _group(owner: str, purpose: str, row: Any) -> GroupRow:
    step, slot, replacement = row["step"], row["slot"], row["replacement"]
    return GroupRow(
        group=f"{owner}-{purpose}-{step}-{slot}-{replacement}",
        step=step,
        slot=slot,
        replacement=replacement,
        dataset_row=row["dataset_row"],
        artifact=row["artifact"],
        grades=row["grades"],
        first=int(row["first"]),
    )


def _log_cursor(text: str | None, *, older: bool) -> tuple[Cursor, int]:
    if text is None:
        return (Cursor(2**62, 2**62), 0) if older else (Cursor(), -1)
    position, _, line = text.rpartition("-")
    return Cursor.parse(position), int(line, 16)


def _escaped(search: str) -> str:
    return search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
