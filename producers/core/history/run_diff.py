"""The differences of two runs: where their histories part, in which event, and what followed from it.

Runs that are forks of one another, or of the same run, share the history up to a step. After it, the
first step with other weights is found by halving, because weights that differ once differ in all later
steps. In that step the events are compared in the order in which they happen: rows, samples, rewards,
and the optimizer step.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from infra.readmodel.evaluation_results import compare_rows, results_by_row
from infra.readmodel.run_pages import Segment
from infra.readmodel.runs import ALL_STEPS
from infra.readmodel.state_at_event import SettledStep
from infra.readmodel.store import ReadModel
from infra.spine.ports.artifacts import Artifacts
from infra.spine.ports.event_log import Cursor, EventStore, Recorded
from producers.core.history.metric_titles import LOSSES, TITLES, VALIDATION
from producers.core.lookup import Lookup
from producers.core.models.comparison import PASSES, differing_settings, flat_settings
from schemas.artifact_refs import ArtifactRef
from schemas.errors import HeadraceError, InvalidConfig, Issue
from schemas.events import GroupGenerated, GroupGraded, RunRequested, StepSettled
from schemas.ids import (
    GroupKey,
    Purpose,
    StreamName,
    grade_stream,
    group_stream,
    policy_stream,
    run_stream,
)
from schemas.limits import groups_per_step
from schemas.sampling import SampleBatch
from schemas.specs import StateRef

KEYS = (*TITLES, *LOSSES)
COMMIT_KEYS = ("experiment.commit_sha", "experiment.branch")
END = Cursor(2**62, 2**62)
LAST = ALL_STEPS[1]


@dataclass(frozen=True, slots=True)
class Lineage:
    """A run and the runs that it continues, itself first. `reach` is the last step of each that belongs
    to its history."""

    runs: tuple[RunRequested, ...]
    reach: Mapping[str, int]

    @property
    def run(self) -> RunRequested:
        return self.runs[0]

    def owner(self, step: int) -> str:
        """The run (its id) whose log has a step of this history."""
        return next(r.run for r in reversed(self.runs) if step <= self.reach[r.run])

    def segments(self, after: int) -> list[Segment]:
        """Whose metrics make up this history after a step."""
        found, first = [], after + 1
        for run in reversed(self.runs):
            last = self.reach[run.run]
            if last >= first:
                found.append((run.run, first, last))
                first = last + 1
        return found


class RunDiffs:
    """Compares two runs."""

    def __init__(
        self, log: EventStore, *, lookup: Lookup, tables: ReadModel, artifacts: Artifacts
    ) -> None:
        self._log = log
        self._lookup = lookup
        self._tables = tables
        self._artifacts = artifacts

    async def diff(self, first: str, second: str) -> Mapping[str, object]:
        """Return what differs between two runs, as JSON. Raises NotFound, InvalidConfig for a run and
        itself, and Conflict when one is archived."""
        both = [await self._lineage(ref) for ref in (first, second)]
        a, b = both
        if a.run.run == b.run.run:
            message = f"name two different runs; {first} and {second} are the same one"
            raise InvalidConfig(message, issues=(Issue("run", message),))
        ancestor = next((run for run in a.runs if run.run in b.reach), None)
        common = min(one.reach[ancestor.run] for one in both) if ancestor else -1
        newest = [await self._newest(one) for one in both]
        step = await self._first_other_step(both, common, min(newest))
        metrics = await self._tables.run_pages.differing_metrics(
            a.segments(common), b.segments(common), KEYS
        )
        ends = [await self._tables.runs.ends(one.run.run, KEYS) for one in both]
        return {
            "runs": [
                {"id": one.run.run, "name": one.run.run_name, "newest_step": at}
                for one, at in zip(both, newest, strict=True)
            ],
            "ancestor": (
                {"id": ancestor.run, "name": ancestor.run_name, "step": min(common, *newest)}
                if ancestor
                else None
            ),
            "settings": differing_settings([await self._settings(one.run) for one in both]),
            "first_other_step": step,
            "first_divergence": None if step is None else await self._divergence(both, step),
            "metrics": [
                {
                    "key": key,
                    "title": TITLES.get(key) or LOSSES.get(key),
                    "differs_from_step": metrics.get(key),
                    "final": [end[key].last[1] if key in end else None for end in ends],
                }
                for key in KEYS
                if any(key in end for end in ends)
            ],
            "held_out": await self._held_out(both, common),
        }

    async def _lineage(self, ref: str) -> Lineage:
        run = await self._lookup.whole_run(ref)
        runs, reach, last = [run], {run.run: LAST}, LAST
        while runs[-1].fork is not None:
            point = runs[-1].fork
            found = await self._log.events_at([(run_stream(point.parent), 1)])
            parent = found[0].event if found else None
            if not isinstance(parent, RunRequested):
                break
            last = min(last, point.step)
            runs.append(parent)
            reach[parent.run] = last
        return Lineage(tuple(runs), reach)

    async def _settings(self, run: RunRequested) -> Mapping[str, str]:
        """The keys of a run, with the commit that it runs in place of the keys that choose one."""
        config = dict(flat_settings(run.config.model_dump(mode="json", exclude_none=True)))
        row = await self._tables.runs.get_run(run.run)
        commit = row[0]["commit_sha"] if row else None
        chosen = {key: value for key, value in config.items() if key not in COMMIT_KEYS}
        return chosen | ({"commit": commit} if commit else {})

    async def _newest(self, lineage: Lineage) -> int:
        """The newest settled step of a run's history; -1 before its first one. A fork has those of its
        parent before it settles one itself."""
        newest = await self._tables.state_at_event.newest_settled(lineage.run.run, END)
        fork = lineage.run.fork
        return newest if newest is not None else -1 if fork is None else fork.step

    async def _state(self, lineage: Lineage, step: int) -> StateRef | None:
        owner = lineage.owner(step)
        place = await self._tables.state_at_event.settled_step(owner, step)
        if place is None:
            return None
        found = await self._log.events_at([(run_stream(owner), place.position)])
        event = found[0].event if found else None
        return event.state if isinstance(event, StepSettled) else None

    async def _first_other_step(
        self, both: Sequence[Lineage], equal: int, newest: int
    ) -> int | None:
        """The first step after `equal` whose weights or optimizer differ; None up to `newest`."""
        if newest <= equal or not await self._differs(both, newest):
            return None
        low, high = equal, newest
        while high - low > 1:
            middle = (low + high) // 2
            if await self._differs(both, middle):
                high = middle
            else:
                low = middle
        return high

    async def _differs(self, both: Sequence[Lineage], step: int) -> bool:
        states = [await self._state(one, step) for one in both]
        hashes = {(s.weights_sha256, s.state_sha256) for s in states if s is not None}
        return len(hashes) > 1

    async def _divergence(self, both: Sequence[Lineage], step: int) -> Mapping[str, object]:
        """The first event of a step that differs, with its counterpart."""
        if step == 0:
            return await self._policies(both, step, "the runs begin with other weights")
        groups = max(groups_per_step(one.run.config) for one in both)
        for slot in range(groups):
            keys = [GroupKey(one.owner(step), Purpose.TRAIN, step, slot) for one in both]
            generated = [await self._event(group_stream(key.id), GroupGenerated) for key in keys]
            graded = [await self._event(grade_stream(key.id), GroupGraded) for key in keys]
            if what := await self._generated_otherwise(generated):
                return _pair(step, what, generated)
            if what := _graded_otherwise(graded):
                return _pair(step, what, graded)
        return await self._policies(both, step, "the same samples and rewards made other weights")

    async def _policies(
        self, both: Sequence[Lineage], step: int, what: str
    ) -> Mapping[str, object]:
        found = []
        for one in both:
            owner = one.owner(step)
            place: SettledStep | None = await self._tables.state_at_event.settled_step(owner, step)
            at = [(policy_stream(owner), place.policy_position)] if place else []
            events = await self._log.events_at(at)
            found.append(events[0] if events else None)
        return _pair(step, what, found)

    async def _event(self, stream: StreamName, kind: type) -> Recorded | None:
        history = (await self._log.load({stream: 0})).get(stream, ())
        return next((one for one in history if isinstance(one.event, kind)), None)

    async def _generated_otherwise(self, both: Sequence[Recorded | None]) -> str | None:
        events = [one.event if one else None for one in both]
        a, b = (event if isinstance(event, GroupGenerated) else None for event in events)
        if a is None or b is None:
            return None if a is b else "one of them has no such group"
        if a.spec.row != b.spec.row:
            return f"another row: {a.spec.row} and {b.spec.row}"
        if a.spec.template.params != b.spec.template.params:
            return "other sampling parameters"
        samples = [await self._samples(event.parts) for event in (a, b)]
        if None not in samples and samples[0] != samples[1]:
            return "other samples"
        return None

    async def _samples(self, parts: Iterable[ArtifactRef]) -> list[str] | None:
        """The conversations and tokens of a group; None if its artifacts are gone."""
        found: list[str] = []
        try:
            for part in parts:
                batch = SampleBatch.model_validate_json(await self._artifacts.get_artifact(part))
                found += [
                    record.model_dump_json(include={"index", "messages", "sequences", "failure"})
                    for record in batch.samples
                ]
        except HeadraceError:
            return None
        return found

    async def _held_out(self, both: Sequence[Lineage], common: int) -> Mapping[str, object] | None:
        """The rows of the newest validation that both runs made after they parted, and how many changed;
        None without one."""
        a, b = both
        curves = [await self._validation_steps(one, common) for one in (a, b)]
        steps = curves[0] & curves[1]
        if not steps:
            return None
        step = max(steps)
        results = []
        for one in both:
            groups = await self._tables.evaluations.groups(f"{one.owner(step)}v{step}")
            results.append(await asyncio.to_thread(results_by_row, groups, threshold=PASSES))
        rows = list(compare_rows(*results))
        counts = Counter(str(row["change"]) for row in rows)
        flipped = [row for row in rows if row["change"] in ("gained", "lost")]
        return {"step": step, "counts": dict(counts), "flipped": flipped}

    async def _validation_steps(self, lineage: Lineage, common: int) -> set[int]:
        return {
            step
            for run, first, last in lineage.segments(common)
            for step, _ in await self._tables.runs.curve(run, VALIDATION)
            if first <= step <= last
        }


def _graded_otherwise(both: Sequence[Recorded | None]) -> str | None:
    events = [one.event if one else None for one in both]
    grades = [e.grades if isinstance(e, GroupGraded) else None for e in events]
    rewards = [None if one is None else [grade.reward for grade in one] for one in grades]
    return None if rewards[0] == rewards[1] else f"other rewards: {rewards[0]} and {rewards[1]}"


def _pair(step: int, what: str, both: Sequence[Recorded | None]) -> Mapping[str, object]:
    return {
        "step": step,
        "what": what,
        "events": [
            None
            if one is None
            else {
                "id": str(one.id),
                "cursor": str(one.cursor),
                "type": one.type,
                "stream": one.stream,
                "version": one.version,
            }
            for one in both
        ],
    }
