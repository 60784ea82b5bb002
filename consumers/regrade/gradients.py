"""Compares the policy gradients of a regrade with those of its run.
Reads: RegradeCompleted.  Emits: GradientsCompared, GradientComparisonCompleted.  Stream: gradients.
Does: computes both gradients of each step on its recorded batch (lane: train).
Waits for: the end of the regrade.
Safe to repeat because: it only reads, and the state knows the last step that was compared.

The learner loads the version that a step started from, as a recovery does
(`consumers/learn/replay.py`), under the name of the regrade, because the run itself may be training in
the same learner. After a comparison it takes the recorded step, so the next one finds its version.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from consumers.learn.replay import (
    HistoryPorts,
    build_step_batch,
    ensure_loaded,
    job_of,
    read_batches,
    read_versions,
)
from consumers.regrade.part import read_groups
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.error_excerpt import excerpt
from schemas.effects import CompareGradients, Failed, StepGradients
from schemas.errors import Refused
from schemas.events import (
    GradientComparisonCompleted,
    GradientsCompared,
    PolicyInitialized,
    PolicyUpdated,
    RegradeCompleted,
    RegradePartGraded,
)
from schemas.events.regrades.groups import RegradedGroup
from schemas.ids import ConsumerName, GroupKey, StreamName, gradients_stream, regrade_stream
from schemas.learner import Learner
from schemas.specs import BatchGroup

GradientsEvent = GradientsCompared | GradientComparisonCompleted
GradientsMessage = RegradeCompleted | StepGradients | Failed

GroupPlace = tuple[int, int]
"""The slot of a group in its step, and its replacement number."""


@dataclass(frozen=True, slots=True)
class GradientsState:
    """The last step that was compared (0: none), how many were, and whether all are."""

    step: int = 0
    steps: int = 0
    ended: bool = False


def evolve(state: GradientsState, event: GradientsEvent) -> GradientsState:
    """Return the state after one event of the stream `gradients-<id>`."""
    match event:
        case GradientsCompared():
            return replace(state, step=event.step, steps=state.steps + 1)
        case GradientComparisonCompleted():
            return replace(state, ended=True)
        case _:
            assert_never(event)


def routes(message: GradientsMessage) -> tuple[StreamName, ...]:
    """Return the stream of a regrade whose gradients are to be compared."""
    if isinstance(message, RegradeCompleted) and message.gradients:
        return (gradients_stream(message.regrade),)
    return ()


def handle(state: GradientsState, message: GradientsMessage, meta: Meta) -> Decision:
    """Request the comparison of one step after the other."""
    if state.ended:
        return NOTHING
    match message:
        case RegradeCompleted(regrade=regrade, run=run):
            first = CompareGradients(regrade=regrade, run=run, after=0)
            return NOTHING if state.steps else Decision(effects=(first,))
        case StepGradients(effect=effect):
            return _record(state, message) if effect.after == state.step else NOTHING
        case Failed(effect=CompareGradients() as effect):
            text = excerpt(f"{message.category}: {message.message}")
            return Decision(events=(_end(state, effect, text),))
        case _:
            return NOTHING


def _record(state: GradientsState, found: StepGradients) -> Decision:
    effect = found.effect
    if found.step is None:
        message = None if state.steps else "no step of the regrade was trained"
        return Decision(events=(_end(state, effect, message),))
    compared = GradientsCompared(
        regrade=effect.regrade,
        run=effect.run,
        step=found.step,
        cosine=found.cosine,
        norm_before=found.norm_before,
        norm_after=found.norm_after,
        advantages=found.advantages,
        turned=found.turned,
        groups=found.groups,
        missing=found.missing,
    )
    following = effect.model_copy(update={"after": found.step})
    return Decision(events=(compared,), effects=(following,))


def _end(
    state: GradientsState, effect: CompareGradients, message: str | None
) -> GradientComparisonCompleted:
    return GradientComparisonCompleted(
        regrade=effect.regrade, run=effect.run, steps=state.steps, message=message
    )


@dataclass(frozen=True, slots=True)
class GradientPorts(HistoryPorts):
    """The learner, and what a run has recorded."""

    learner: Learner


async def perform(effect: CompareGradients, ports: GradientPorts) -> StepGradients:
    """Compare the gradients of the first step after `effect.after` that the regrade has groups of.
    Raises Refused when the run's history is gone, ReplayDiverged, and TransientError."""
    stream = regrade_stream(effect.regrade)
    recorded = (await ports.log.load({stream: 0}))[stream]
    parts = [r.event for r in recorded if isinstance(r.event, RegradePartGraded)]
    graded = {step for part in parts for step in part.by_step if step > effect.after}
    versions = await read_versions(ports, effect.run)
    first = versions[min(versions)] if versions else None
    if not isinstance(first, PolicyInitialized):
        raise Refused(f"run {effect.run} has no version 0 in the log; regrade a run that has")
    updates = [(n, v) for n, v in versions.items() if isinstance(v, PolicyUpdated)]
    number, update = next(((n, v) for n, v in updates if v.step in graded), (0, None))
    if update is None:
        return StepGradients(effect=effect)
    groups = {
        (key.slot, key.replacement): group
        for part in parts
        if update.step in part.by_step
        for group in (await read_groups(part.artifact, ports.artifacts)).groups
        if group.step == update.step and (key := GroupKey.parse(group.group))
    }
    spec, base = first.spec, versions[number - 1].state
    [assembled] = await read_batches(ports, effect.run, [update])
    known = [group for group in assembled.groups if _place(group) in groups]
    whole = await build_step_batch(
        ports, spec, number=number, groups=assembled.groups, rows=assembled.rows
    )
    before, after = [
        await build_step_batch(ports, spec, number=number, groups=chosen, rows=())
        for chosen in _both(known, groups)
    ]
    job = replace(job_of(spec), run=effect.regrade)
    await ensure_loaded(ports.learner, ports, spec, base, taken=number - 1, alias=effect.regrade)
    found = await ports.learner.compare_gradients(job, before, after)
    await ports.learner.step(job, whole, export_state=False, export_weights=False)
    return StepGradients(
        effect=effect,
        step=update.step,
        cosine=found.cosine,
        norm_before=found.norm_before,
        norm_after=found.norm_after,
        advantages=found.advantages,
        turned=found.turned,
        groups=len(known),
        missing=len(assembled.groups) - len(known),
    )


def _place(group: BatchGroup) -> GroupPlace:
    return group.slot, group.replacement


def _both(
    batch: list[BatchGroup], groups: Mapping[GroupPlace, RegradedGroup]
) -> tuple[list[BatchGroup], list[BatchGroup]]:
    """The groups of a batch with the rewards before and after."""
    before: list[BatchGroup] = []
    after: list[BatchGroup] = []
    for group in batch:
        regraded = groups[_place(group)]
        for grades, chosen in ((regraded.before, before), (regraded.after, after)):
            parts = {name: tuple(g.parts.get(name) for g in grades) for name in group.parts}
            rewards = tuple(grade.reward for grade in grades)
            chosen.append(group.model_copy(update={"rewards": rewards, "parts": parts}))
    return before, after


CONSUMER: Consumer[
    GradientsState, GradientsEvent, GradientsMessage, CompareGradients, GradientPorts
] = Consumer(
    name=ConsumerName("compare"),
    category="gradients",
    reads=(RegradeCompleted,),
    emits=(GradientsCompared, GradientComparisonCompleted),
    effects=(CompareGradients,),
    initial=GradientsState(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    perform=perform,
    ports=GradientPorts,
)
