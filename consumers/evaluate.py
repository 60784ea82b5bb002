"""Evaluates a model or a checkpoint on a dataset, and validates runs while they train.
Reads: EvaluationRequested, WorkspaceSynced, WorkspaceRejected, GroupGraded, EvaluationStopRequested.
Emits: EvaluationStarted, GroupsRequested, GroupsSettled, EvaluationCompleted.  Stream: eval.
Does: nothing itself; it requests groups.  Waits for: the workspace, and each chunk's groups.
Safe to repeat because: the state records the requested chunks and the settled slots."""

from dataclasses import dataclass, field, replace
from typing import Never, assert_never, get_args

from consumers.run.settle import settle
from consumers.run.start import entry_point_problem, scoring_of
from infra.runtime.consumer import NOTHING, Consumer, Decision, Meta
from schemas.events import (
    EvaluationCompleted,
    EvaluationRequested,
    EvaluationStarted,
    EvaluationStopRequested,
    GroupGraded,
    GroupsRequested,
    GroupsSettled,
    SettledGroup,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.ids import ConsumerName, Purpose, StreamName, eval_stream
from schemas.specs import Entrypoint, RolloutRef, SampleEntry, Slot

EvalEvent = (
    EvaluationRequested
    | EvaluationStopRequested
    | EvaluationStarted
    | GroupsRequested
    | GroupsSettled
    | EvaluationCompleted
)
EvalMessage = (
    EvaluationRequested
    | WorkspaceSynced
    | WorkspaceRejected
    | GroupGraded
    | EvaluationStopRequested
)

MOST_SLOTS = 500
"""Slots of one request. Each takes some 40 bytes, and the event with the template has 64 KiB at most."""


@dataclass(frozen=True, slots=True)
class EvalState:
    """`asked` counts the rows requested so far. `rewards` are those of settled slots, and they are
    sorted by slot when they are read. `first_error` is the lowest slot with an error, and the error."""

    request: EvaluationRequested | None = None
    started: EvaluationStarted | None = None
    asked: int = 0
    rewards: dict[int, tuple[float | None, ...]] = field(default_factory=dict)
    tokens: int = 0
    failed: int = 0
    first_error: tuple[int, str] | None = None
    ended: bool = False


def evolve(state: EvalState, event: EvalEvent) -> EvalState:
    """Return the state after one event of the stream `eval-<id>`."""
    match event:
        case EvaluationRequested():
            return replace(state, request=event)
        case EvaluationStarted():
            return replace(state, started=event)
        case GroupsRequested():
            return replace(state, asked=state.asked + len(event.slots))
        case GroupsSettled():
            for group in event.groups:
                state = _count(state, group)
            return state
        case EvaluationCompleted():
            return replace(state, ended=True)
        case EvaluationStopRequested():
            return state
        case _:
            assert_never(event)


def _count(state: EvalState, group: SettledGroup) -> EvalState:
    failures = [entry for entry in group.entries if entry.failure is not None]
    found = _error(failures) or group.dropped
    errors = [(group.group.slot, found)] if found else []
    errors += [state.first_error] if state.first_error else []
    return replace(
        state,
        rewards={**state.rewards, group.group.slot: group.group.rewards},
        tokens=state.tokens + sum(entry.completion_tokens for entry in group.entries),
        failed=state.failed + sum(reward is None for reward in group.group.rewards),
        first_error=min(errors, default=None),
    )


def _error(failures: list[SampleEntry]) -> str | None:
    return f"{failures[0].failure}: {failures[0].message}" if failures else None


def routes(message: EvalMessage) -> tuple[StreamName, ...]:
    """Return the stream of the evaluation that a message is about."""
    match message:
        case WorkspaceSynced() | WorkspaceRejected():
            requester = message.requester
            return (requester,) if requester and requester.startswith("eval-") else ()
        case GroupGraded():
            evaluating = message.spec.purpose == Purpose.EVALUATE
            return (eval_stream(message.spec.owner),) if evaluating else ()
        case EvaluationRequested() | EvaluationStopRequested():
            return (eval_stream(message.evaluation),)


def handle(state: EvalState, message: EvalMessage, meta: Meta) -> Decision:
    """Decide what an evaluation does next: start, request rows, count a graded group, or end."""
    if state.ended:
        return NOTHING
    match message:
        case EvaluationRequested():
            return _begin(state, message)
        case WorkspaceSynced():
            return _start_with_workspace(state, message)
        case WorkspaceRejected():
            return _end(state, "failed", message.message)
        case GroupGraded():
            return _settle_group(state, message)
        case EvaluationStopRequested():
            return _end(state, "stopped", "stopped by a user")


def _begin(state: EvalState, request: EvaluationRequested) -> Decision:
    if state.started is not None or request.workspace is not None:
        return NOTHING
    return _start(state, request, request.template.rollout)


def _start_with_workspace(state: EvalState, synced: WorkspaceSynced) -> Decision:
    request = state.request
    if state.started is not None or request is None or request.config is None:
        return NOTHING
    config = request.config
    entrypoint = Entrypoint(
        rollout=config.experiment.rollout or "", path=config.experiment.entrypoint or ""
    )
    found = next((r for r in synced.rollouts if r.entrypoint == entrypoint), None)
    samples = config.evaluation.n
    problem = entry_point_problem(found, entrypoint, config.advanced, num_samples=samples)
    if found is None or problem is not None:
        return _end(state, "failed", problem or "no entry point")
    rollout = RolloutRef(
        snapshot=synced.snapshot,
        commit=synced.commit,
        entrypoint=entrypoint,
        kind=found.kind,
        workflow=found.workflow,
        **scoring_of(found, config.advanced),
        env=config.env,
        secrets=config.secrets.required,
        workspace=request.workspace,
        submitter=request.submitter,
        network=config.advanced.network,
        max_turns=config.advanced.max_turns,
        max_sample_tokens=config.advanced.max_sample_tokens,
        workflow_timeout_s=config.evaluation.agent_workflow_timeout_s,
        grader_timeout_s=config.evaluation.grader_timeout_s,
    )
    return _start(state, request, rollout)


def _start(state: EvalState, request: EvaluationRequested, rollout: RolloutRef | None) -> Decision:
    started = EvaluationStarted(
        evaluation=request.evaluation,
        template=request.template.model_copy(update={"rollout": rollout}),
        rows=request.rows,
        batch_size=request.batch_size,
        pass_threshold=request.pass_threshold,
        run=request.run,
        step=request.step,
    )
    return Decision(events=(started, *_request_chunk(evolve(state, started))))


def _request_chunk(state: EvalState) -> tuple[GroupsRequested, ...]:
    """Return requests for the next chunk of rows, as many as the chunk needs."""
    started = state.started
    if started is None or state.asked >= len(started.rows):
        return ()
    chunk = started.rows[state.asked : state.asked + started.batch_size]
    slots = tuple(Slot(slot=state.asked + n, row=row) for n, row in enumerate(chunk))
    return tuple(
        GroupsRequested(
            owner=started.evaluation,
            purpose=Purpose.EVALUATE,
            step=started.step or 0,
            slots=slots[first : first + MOST_SLOTS],
            template=started.template,
        )
        for first in range(0, len(slots), MOST_SLOTS)
    )


def _settle_group(state: EvalState, message: GroupGraded) -> Decision:
    started, key = state.started, message.spec.group_key
    if started is None or key.slot in state.rewards:
        return NOTHING
    settled = GroupsSettled(
        owner=key.owner, purpose=key.purpose, step=key.step, groups=(settle(message),)
    )
    state = evolve(state, settled)
    if len(state.rewards) == len(started.rows):
        return Decision(events=(settled, *_result(state).events))
    more = _request_chunk(state) if len(state.rewards) == state.asked else ()
    return Decision(events=(settled, *more))


def _result(state: EvalState) -> Decision:
    rewards = _rewards(state)
    if not rewards:
        why = state.first_error[1] if state.first_error else "the evaluation has no rows"
        return _end(state, "failed", f"no sample has a reward; the first error: {why}")
    return _end(state, "finished", None)


def _rewards(state: EvalState) -> list[float]:
    in_order = [state.rewards[slot] for slot in sorted(state.rewards)]
    return [reward for group in in_order for reward in group if reward is not None]


def _end(state: EvalState, status: str, message: str | None) -> Decision:
    request = state.started or state.request
    if request is None:
        return NOTHING
    rewards = _rewards(state)
    figures = {
        "eval/count": float(sum(len(group) for group in state.rewards.values())),
        "eval/failed": float(state.failed),
        "eval/tokens": float(state.tokens),
    }
    mean = sum(rewards) / len(rewards) if rewards else None
    if mean is not None:
        passed = sum(reward >= request.pass_threshold for reward in rewards)
        figures |= {"eval/reward": mean, "eval/pass_rate": passed / len(rewards)}
    ended = EvaluationCompleted.model_validate(
        {
            "evaluation": request.evaluation,
            "status": status,
            "reward": mean,
            "metrics": figures,
            "message": message,
            "run": request.run,
            "step": request.step,
        }
    )
    return Decision(events=(ended,))


CONSUMER: Consumer[EvalState, EvalEvent, EvalMessage, Never] = Consumer(
    name=ConsumerName("evaluate"),
    category="eval",
    reads=get_args(EvalMessage),
    emits=(EvaluationStarted, GroupsRequested, GroupsSettled, EvaluationCompleted),
    effects=(),
    initial=EvalState(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    fold_version=2,
    snapshots=EvalState,
)
