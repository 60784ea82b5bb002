"""The queries of the API about a run. For an API key that is bound to a workspace, the runs of
others do not exist."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypedDict, cast

from infra.names import several_error
from infra.ports.actor import visible_workspaces
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.ids import GroupKey, Purpose

SQL = queries("infra/readmodel/read_model.sql")


class RunJson(TypedDict):
    """A run as lists show it. `dataset` is a name with the number of its version, like `sums@2`. That of
    the first version is left out."""

    id: str
    name: str
    status: str
    phase: str
    algorithm: str
    execution_mode: str
    model: str
    dataset: str
    dataset_id: str
    dataset_version: int
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
    creator: str | None
    error: str | None
    tags: list[str]
    note: str | None
    workspace_name: str | None
    project: str | None
    parent: str | None
    parent_step: int | None
    parent_name: str | None


class CheckpointJson(TypedDict):
    step: int
    ref: str
    reward: float | None
    uri: str
    manifest_sha256: str
    adapter_sha256: str
    created_at: datetime
    hub_status: str | None
    hub_repository: str | None
    hub_url: str | None
    hub_revision: str | None
    hub_error: str | None
    hub_requested_by: str | None


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
class PageRange:
    """Which part of a list a page shows."""

    limit: int = 50
    offset: int = 0


ALL_STEPS = (0, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A graded group. `first` is the position of its first sample among all samples of the query."""

    group: str
    step: int
    slot: int
    replacement: int
    dataset_row: int
    artifact: str
    grades: str
    first: int
    judgements: str | None = None


@dataclass(frozen=True, slots=True)
class CurveEnds:
    """The first and the last point of a metric, as (step, value). With one point they are the same."""

    first: tuple[int, float]
    last: tuple[int, float]


@dataclass(frozen=True, slots=True)
class MetricHistory:
    """A metric with at least one point. The first and the last point are those of the whole run, and so
    are the least and the largest value."""

    key: str
    points: tuple[PointJson, ...]
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class RunMark:
    """Something at a step of a run that a curve marks. The text is that of a warning."""

    step: int
    kind: Literal["checkpoint", "warning"]
    text: str


class Runs:
    """Queries over runs and what belongs to them."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def ended_before(self, moment: datetime) -> list[RunJson]:
        """Runs that ended before `moment`, the oldest first, and were neither archived nor restored
        since; at most 1000."""
        rows = await self._pool.fetch(
            SQL["runs_ended_before"],
            moment,
        )
        return [cast(RunJson, dict(row)) for row in rows]

    async def get_run(self, ref: str) -> tuple[RunJson, str] | None:
        """A run by id or name, and its config as JSON text. Raises Conflict when several runs have the
        name."""
        rows = await self._pool.fetch(SQL["run"], ref, visible_workspaces())
        if not rows:
            return None
        if len(rows) > 1 and rows[0]["id"] != ref:
            raise several_error("run", ref, [(one["id"], one["workspace_name"]) for one in rows])
        values = dict(rows[0])
        config = values.pop("config")
        return cast(RunJson, values), config

    async def beside(self, run: str, *, most: int) -> list[tuple[RunJson, str]]:
        """A run (its id), and the newest ones with its model, data, code and workspace that are not
        archived, each with its config as JSON text."""
        found = []
        for row in await self._pool.fetch(SQL["runs_beside"], run, visible_workspaces(), most):
            values = dict(row)
            config = values.pop("config")
            found.append((cast(RunJson, values), config))
        return found

    async def values_at(
        self, runs: Sequence[str], key: str, steps: Sequence[int]
    ) -> dict[int, list[float]]:
        """The values of a metric of several runs (ids) at these steps, by step."""
        found: dict[int, list[float]] = {}
        for row in await self._pool.fetch(SQL["values_at"], list(runs), key, list(steps)):
            found.setdefault(row["step"], []).append(row["value"])
        return found

    async def dataset_ref(self, run: str) -> str | None:
        """The run's dataset, a DatasetRef as JSON."""
        found: str | None = await self._pool.fetchval(SQL["dataset_ref_of_run"], run)
        return found

    async def metrics(self, run: str) -> dict[str, list[PointJson]]:
        """Key -> points in order of step. Values that are not finite are left out."""
        rows = await self._pool.fetch(SQL["metrics"], run)
        found: dict[str, list[PointJson]] = {}
        for row in rows:
            point = PointJson(step=row["step"], value=row["value"], at=row["at"])
            found.setdefault(row["key"], []).append(point)
        return found

    async def sparklines(
        self, runs: Sequence[RunJson], key: str, *, points: int = 32
    ) -> dict[str, list[tuple[int, float]]]:
        """About `points` values of one metric for each run, as (step, value) by the run's id."""
        rows = await self._pool.fetch(
            SQL["sparklines"],
            [run["id"] for run in runs],
            [run["current_step"] or 0 for run in runs],
            key,
            points,
        )
        found: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            found.setdefault(row["run"], []).append((row["step"], row["value"]))
        return found

    async def step_seconds(
        self, runs: Sequence[RunJson], key: str, *, steps: int = 20
    ) -> dict[str, float]:
        """How long each of the newest steps of these runs took on average, by the run's id, told from
        when a metric had its values. A run without two of them is absent."""
        rows = await self._pool.fetch(
            SQL["step_seconds"],
            [run["id"] for run in runs],
            [run["current_step"] or 0 for run in runs],
            key,
            steps,
        )
        return {row["run"]: row["seconds"] for row in rows}

    async def metric_keys(self, run: str) -> list[str]:
        """The names of the metrics that a run has, in alphabetical order."""
        return [row["key"] for row in await self._pool.fetch(SQL["metric_keys"], run)]

    async def curve(
        self, run: str, key: str, *, since: datetime | None = None
    ) -> list[tuple[int, float]]:
        """One metric of a run as (step, value), in order of step; with `since` only the newer part."""
        rows = await self._pool.fetch(SQL["curve"], run, key, since)
        return [(row["step"], row["value"]) for row in rows]

    async def thinned_curves(
        self,
        run: str,
        keys: Sequence[str],
        *,
        most: int,
        since: datetime | None = None,
        steps: tuple[int, int] = ALL_STEPS,
    ) -> dict[str, list[tuple[int, float]]]:
        """At most about `most` points of each of these metrics, as (step, value) in order of step. Of
        each stretch of steps the least and the largest value stay, and the first and the last point of
        all, so a metric with few points keeps all. Only points since a moment and between two `steps`
        count. A metric without any is absent."""
        rows = await self._pool.fetch(
            SQL["thinned_curves"], run, list(keys), since, max(1, most // 2), *steps
        )
        found: dict[str, dict[int, float]] = {}
        for row in rows:
            points = found.setdefault(row["key"], {})
            if row["lowest"] is None:
                points[row["step"]] = math.nan
            else:
                points |= {int(step): value for value, step in (row["lowest"], row["highest"])}
            points |= {row["first"]: row["first_value"], row["last"]: row["last_value"]}
        return {key: sorted(found[key].items()) for key in keys if key in found}

    async def sampled_curves(
        self,
        run: str,
        keys: Sequence[str],
        *,
        most: int,
        since: datetime | None = None,
        steps: tuple[int, int] = ALL_STEPS,
    ) -> dict[str, list[tuple[int, float]]]:
        """About `most` points of each of these metrics, evenly apart, as (step, value) in order of step,
        with the first and the last one. For a long run this is much faster than `thinned_curves`, but it
        leaves out peaks. The range and absent metrics are as there."""
        rows = await self._pool.fetch(SQL["sampled_curves"], run, list(keys), since, most, *steps)
        found: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            found.setdefault(row["key"], []).append((row["step"], row["value"]))
        return found

    async def metric_histories(
        self, run: str, keys: Sequence[str], *, most_points: int
    ) -> list[MetricHistory]:
        """The histories of these metrics of a run, in their order, each with at most `most_points`
        points (at least 2), evenly apart. Values that are not finite are left out, and a metric
        without others is absent."""
        rows = await self._pool.fetch(SQL["metric_histories"], run, most_points, list(keys))
        points: dict[str, list[PointJson]] = {}
        for row in rows:
            point = PointJson(step=row["step"], value=row["value"], at=row["at"])
            points.setdefault(row["key"], []).append(point)
        extremes = await self._pool.fetch(SQL["metric_extremes"], run, list(points))
        ends = {row["key"]: (row["least"], row["most"]) for row in extremes}
        return [
            MetricHistory(key, tuple(points[key]), *ends[key])
            for key in keys
            if key in points and key in ends
        ]

    async def marks(self, run: str, *, steps: tuple[int, int], most: int) -> list[RunMark]:
        """The newest checkpoints and warnings between two steps, at most so many of each, in order of
        step."""
        rows = await self._pool.fetch(SQL["marks"], run, *steps, most)
        found = [RunMark(row["step"], row["kind"], row["text"]) for row in rows]
        return sorted(found, key=lambda mark: mark.step)

    async def recent_means(self, run: str, keys: Sequence[str], *, after: int) -> dict[str, float]:
        """The means of metrics over the steps after this one. A metric without points is absent."""
        rows = await self._pool.fetch(SQL["recent_means"], run, list(keys), after)
        return {row["key"]: row["mean"] for row in rows}

    async def ends(self, run: str, keys: Sequence[str]) -> dict[str, CurveEnds]:
        """The first and the last point of each of these metrics of a run. A metric without points is
        absent."""
        rows = await self._pool.fetch(SQL["ends"], run, list(keys))
        return {
            row["key"]: CurveEnds(
                (row["first_step"], row["first"]), (row["last_step"], row["last"])
            )
            for row in rows
        }

    async def total(self, run: str, key: str) -> float | None:
        """The sum of a metric of a run over its steps, without NaN; None without points."""
        found: float | None = await self._pool.fetchval(SQL["total"], run, key)
        return found

    async def last_steps(self, run: str, keys: Sequence[str]) -> dict[str, int]:
        """The newest step of each of these metrics of a run; -1 for one without points."""
        rows = await self._pool.fetch(SQL["last_steps"], run, list(keys))
        return {row["key"]: -1 if row["step"] is None else row["step"] for row in rows}

    async def new_points(
        self, run: str, last: Mapping[str, int]
    ) -> dict[str, list[tuple[int, float]]]:
        """The points of metrics of a run after these steps, as (step, value). `last` holds a step for
        each metric."""
        rows = await self._pool.fetch(SQL["new_points"], run, list(last), list(last.values()))
        found: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            found.setdefault(row["key"], []).append((row["step"], row["value"]))
        return found

    async def checkpoints(self, run: str) -> list[CheckpointJson]:
        """The run's checkpoints, in order of step, each with its newest upload to a model hub."""
        rows = await self._pool.fetch(
            SQL["checkpoints"],
            run,
        )
        return [cast(CheckpointJson, dict(row)) for row in rows]

    async def chosen_checkpoints(
        self, run: str, *, newest: int, steps: Sequence[int] = ()
    ) -> tuple[list[CheckpointJson], int]:
        """The newest checkpoints of a run, the best one, and those of these steps, the newest first, and
        how many it has in all."""
        rows = await self._pool.fetch(SQL["chosen_checkpoints"], run, newest, list(steps))
        total: int = await self._pool.fetchval(SQL["count_checkpoints"], run)
        return [cast(CheckpointJson, dict(row)) for row in rows], total

    async def groups(
        self, owner: str, purpose: str, page: PageRange, *, step: int | None = None
    ) -> tuple[list[GroupRow], int]:
        """The groups that hold the samples of a page, and how many samples there are in all. A page
        counts samples."""
        rows = await self._pool.fetch(
            SQL["groups"],
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

    async def groups_before(
        self, owner: str, purpose: str, place: tuple[int, int, int], *, limit: int
    ) -> list[GroupRow]:
        """At most `limit` groups from a (step, slot, replacement) back to the first one, the last one
        first. Their `first` is 0."""
        rows = await self._pool.fetch(SQL["groups_before"], owner, purpose, *place, limit)
        return [_group(owner, purpose, row) for row in rows]

    async def groups_after(
        self, owner: str, purpose: str, place: tuple[int, int, int], *, last_step: int, limit: int
    ) -> list[GroupRow]:
        """At most `limit` groups behind a (step, slot, replacement) up to the step `last_step`, in
        order, without those whose samples were refuted. Their `first` is 0."""
        rows = await self._pool.fetch(SQL["groups_after"], owner, purpose, *place, last_step, limit)
        return [_group(owner, purpose, row) for row in rows]

    async def groups_of_row(
        self, owner: str, purpose: str, dataset_row: int, *, near: int
    ) -> list[tuple[int, int, int]]:
        """The (step, slot, replacement) of groups that answered one dataset row, in order of step. They
        are the nearest ones to the step `near`, at most 24, among 5000 groups before it and 5000 after
        it."""
        rows = await self._pool.fetch(SQL["groups_of_row"], owner, purpose, dataset_row, near)
        return sorted((row["step"], row["slot"], row["replacement"]) for row in rows)

    async def newest_graded_step(self, owner: str, purpose: str) -> int | None:
        """The newest step with a graded group; None without one."""
        step: int | None = await self._pool.fetchval(SQL["newest_graded_step"], owner, purpose)
        return step

    async def grades_of_steps(
        self, run: str, steps: Sequence[int]
    ) -> dict[int, list[tuple[str, str]]]:
        """Each training group of these steps with its grades as JSON, by step; at most 50 groups of
        each step."""
        found: dict[int, list[tuple[str, str]]] = {}
        for row in await self._pool.fetch(SQL["grades_of_steps"], run, list(steps)):
            key = GroupKey(run, Purpose.TRAIN, row["step"], row["slot"], row["replacement"])
            found.setdefault(row["step"], []).append((str(key), row["grades"]))
        return found

    async def num_groups(self, owner: str, purpose: str) -> int:
        """How many groups of `owner` are graded."""
        count: int = await self._pool.fetchval(SQL["count_groups"], owner, purpose)
        return count

    async def logs(
        self,
        run: str,
        *,
        limit: int,
        cursor: str | None = None,
        older: bool = True,
        level: str | None = None,
    ) -> tuple[list[LogJson], str | None]:
        """A page of lines (of one `level` or of all) in the order of the log, and the cursor of the next
        page. Without `cursor` the page holds the newest lines (`older`) or the first ones, and with it
        those beyond it. Raises ValueError when `cursor` is not a cursor of this method."""
        at, line = _log_cursor(cursor, older=older)
        rows = await self._pool.fetch(
            SQL["older_log_lines" if older else "newer_log_lines"],
            run,
            at.xid,
            at.position,
            line,
            limit,
            level,
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
        judgements=row["judgements"],
    )


def _log_cursor(text: str | None, *, older: bool) -> tuple[Cursor, int]:
    if text is None:
        return (Cursor(2**62, 2**62), 0) if older else (Cursor(), -1)
    position, _, line = text.rpartition("-")
    return Cursor.parse(position), int(line, 16)


def escape_like(search: str) -> str:
    """A text as a pattern of `like` that matches only itself."""
    return search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
