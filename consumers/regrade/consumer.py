"""Grades the recorded samples of a run again.
Reads: RegradeRequested, WorkspaceSynced, WorkspaceRejected.
Emits: RegradeStarted, RegradePartGraded, RegradeCompleted.  Stream: regrade.
Does: grades part after part of the recorded groups, without a sampler (lane: user).
Waits for: the workspace, if the grader of another commit is named.
Safe to repeat because: the state counts the parts, and a part that is in the log decides nothing.

A part begins where the one before ended (`consumers/regrade/part.py`), so one that was interrupted is
graded again from its beginning, and gives the same grades. The report is the sum of all parts.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import assert_never, get_args

from consumers.regrade.part import MOST_UNGRADED, MOST_WORST, RegradePorts, regrade_part
from consumers.regrade.weights import reweigh_rollout
from consumers.run.start import entrypoint_of, rollout_of
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.error_excerpt import excerpt
from schemas.algorithms import failed_rewards
from schemas.effects import Failed, GroupsRegraded, RegradeGroups
from schemas.errors import Refused
from schemas.events import (
    RegradeCompleted,
    RegradePartGraded,
    RegradeRequested,
    RegradeStarted,
    UngradedSample,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.events.regrades.figures import Disagreement, RegradeSums, report_of, worst_of
from schemas.ids import ConsumerName, StreamName, category, regrade_stream
from schemas.specs import RolloutRef

RegradeEvent = RegradeRequested | RegradeStarted | RegradePartGraded | RegradeCompleted
RegradeMessage = RegradeRequested | WorkspaceSynced | WorkspaceRejected | GroupsRegraded | Failed

NO_SUMS = RegradeSums()


@dataclass(frozen=True, slots=True)
class RegradeState:
    """The request, the rollout with the new grader, the number of graded parts, and their figures."""

    request: RegradeRequested | None = None
    rollout: RolloutRef | None = None
    parts: int = 0
    sums: RegradeSums = NO_SUMS
    worst: tuple[Disagreement, ...] = ()
    ungraded: tuple[UngradedSample, ...] = ()
    failures: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    ended: bool = False


def evolve(state: RegradeState, event: RegradeEvent) -> RegradeState:
    """Return the state after one event of a regrade's stream."""
    match event:
        case RegradeRequested():
            return replace(state, request=event)
        case RegradeStarted():
            return replace(state, rollout=event.rollout)
        case RegradePartGraded():
            return _add_part(state, event)
        case RegradeCompleted():
            return replace(state, ended=True)
        case _:
            assert_never(event)


def _add_part(state: RegradeState, part: RegradePartGraded) -> RegradeState:
    failures = Counter(state.failures) + Counter(part.failures)
    return replace(
        state,
        parts=part.number,
        sums=sum(part.by_step.values(), state.sums),
        worst=worst_of((*state.worst, *part.worst), most=MOST_WORST),
        ungraded=(*state.ungraded, *part.ungraded)[:MOST_UNGRADED],
        failures=dict(sorted(failures.items())),
        seconds=state.seconds + part.seconds,
    )


def routes(message: RegradeMessage) -> tuple[StreamName, ...]:
    """Return the stream of the regrade that a message is about."""
    match message:
        case RegradeRequested():
            return (regrade_stream(message.regrade),)
        case WorkspaceSynced() | WorkspaceRejected():
            requester = message.requester
            return (requester,) if requester and category(requester) == "regrade" else ()
        case _:
            return ()


def handle(state: RegradeState, message: RegradeMessage, meta: Meta) -> Decision:
    """Decide what a regrade does next: start, grade a part, or end."""
    request = state.request
    if isinstance(message, RegradeRequested):
        request = message
    if request is None or state.ended:
        return NOTHING
    match message:
        case RegradeRequested():
            waits = state.rollout is not None or message.config is not None
            return NOTHING if waits else _start(message, message.rollout)
        case WorkspaceSynced():
            return NOTHING if state.rollout else _start_with_workspace(request, message)
        case WorkspaceRejected():
            return NOTHING if state.rollout else _end(state, request, message.message)
        case GroupsRegraded():
            return _count_part(state, request, message, meta)
        case Failed(effect=RegradeGroups() as effect):
            text = excerpt(f"{message.category}: {message.message}")
            return _end(state, request, text) if effect.number == state.parts + 1 else NOTHING
        case _:
            return NOTHING


def _start(request: RegradeRequested, rollout: RolloutRef) -> Decision:
    if request.rubrics:
        # Their keys are those of the person who chose the judges, and not of the run's author.
        changes = {"rubrics": request.rubrics, "submitter": request.submitter}
        rollout = rollout.model_copy(update=changes)
    rollout = reweigh_rollout(rollout, request.weights)
    started = RegradeStarted(regrade=request.regrade, run=request.run, rollout=rollout)
    return Decision(events=(started,), effects=(_part(request, rollout, 1, after=""),))


def _part(
    request: RegradeRequested, rollout: RolloutRef, number: int, *, after: str
) -> RegradeGroups:
    return RegradeGroups(
        regrade=request.regrade,
        run=request.run,
        number=number,
        after=after,
        request=request,
        rollout=rollout,
    )


def _start_with_workspace(request: RegradeRequested, synced: WorkspaceSynced) -> Decision:
    config = request.config
    if config is None:
        return NOTHING
    try:
        rollout = rollout_of(
            config,
            entrypoint_of(config),
            synced.rollouts,
            snapshot=synced.snapshot,
            commit=synced.commit,
            workspace=request.workspace,
            submitter=request.submitter,
            failed=failed_rewards(config.advanced),
            reward_models=request.rollout.reward_models,
            num_samples=config.training.n_samples_per_prompt,
        )
        if rollout.kind == "server":
            raise Refused(
                f"{rollout.entrypoint.path} of commit {synced.commit[:12]} is a rollout server, which "
                "grades samples while it makes them; name a commit with a Grader or reward functions"
            )
    except Refused as error:
        return _end(RegradeState(), request, error.message)
    return _start(request, rollout)


def _count_part(
    state: RegradeState, request: RegradeRequested, message: GroupsRegraded, meta: Meta
) -> Decision:
    effect = message.effect
    if effect.number != state.parts + 1 or state.rollout is None:
        return NOTHING
    graded = RegradePartGraded(
        regrade=request.regrade,
        run=request.run,
        number=effect.number,
        artifact=message.artifact,
        by_step=message.by_step,
        worst=message.worst,
        ungraded=message.ungraded,
        failures=message.failures,
        following=message.following,
        seconds=meta.seconds,
    )
    state = evolve(state, graded)
    if message.following is None:
        return Decision(events=(graded, *_result(state, request).events))
    following = _part(request, effect.rollout, effect.number + 1, after=message.following)
    return Decision(events=(graded,), effects=(following,))


def _result(state: RegradeState, request: RegradeRequested) -> Decision:
    if not state.sums.groups:
        steps = f"steps {request.steps[0]} to {request.steps[1]}" if request.steps else "the run"
        share = f" with a share of {request.share:g}" if request.share < 1 else ""
        return _end(state, request, f"there is no graded group in {steps}{share}; choose others")
    return _end(state, request, None)


def _end(state: RegradeState, request: RegradeRequested, message: str | None) -> Decision:
    ended = RegradeCompleted(
        regrade=request.regrade,
        run=request.run,
        status="finished" if message is None else "failed",
        report=report_of(state.sums) if state.sums.groups else None,
        worst=state.worst,
        ungraded=state.ungraded,
        failures=state.failures,
        parts=state.parts,
        seconds=state.seconds,
        message=message,
        gradients=request.gradients and message is None,
    )
    return Decision(events=(ended,))


CONSUMER: Consumer[RegradeState, RegradeEvent, RegradeMessage, RegradeGroups, RegradePorts] = (
    Consumer(
        name=ConsumerName("regrade"),
        category="regrade",
        reads=(RegradeRequested, WorkspaceSynced, WorkspaceRejected),
        emits=get_args(RegradeEvent)[1:],
        effects=(RegradeGroups,),
        initial=RegradeState(),
        evolve=evolve,
        handle=handle,
        routes=routes,
        perform=regrade_part,
        ports=RegradePorts,
    )
)
