"""Evaluates a model or a checkpoint on a dataset, and validates runs while they train.
Reads: EvaluationRequested, WorkspaceSynced, WorkspaceRejected, GroupGraded, EvaluationStopRequested,
EvaluationRetryRequested.
Emits: EvaluationStarted, GroupsRequested, GroupsSettled, EvaluationCompleted.  Stream: eval.
Does: nothing itself; it requests groups.  Waits for: the workspace, and each chunk's groups.
Safe to repeat because: the state records the requested chunks and the settled slots.

A retry requests only the attempts that were left out, as groups with the number of the retry as their
replacement number. Their results take the places of the missing ones. An attempt that failed because of
what the policy wrote has a result, and is not repeated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Never, assert_never, get_args

from consumers.evaluation_figures import RowOutcome, evaluation_figures, failed_by_policy
from consumers.run.settle import settle
from consumers.run.start import entrypoint_of, rollout_of
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from schemas.costs.work import Spent, add_spent
from schemas.errors import Refused
from schemas.events import (
    EvaluationCompleted,
    EvaluationRequested,
    EvaluationRetryRequested,
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
from schemas.specs import RolloutRef, SampleEntry, Slot

EvalEvent = (
    EvaluationRequested
    | EvaluationStopRequested
    | EvaluationRetryRequested
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
    | EvaluationRetryRequested
)

MOST_SLOTS, SLOT_BYTES, ATTEMPT_BYTES = 500, 40, 4
"""Slots of one request. Each takes some 40 bytes and 4 for each of its attempts, and the event with the
template has 64 KiB at most."""


@dataclass(frozen=True, slots=True)
class EvalState:
    """`retry` is the number of the current retry, and 0 before the first. `todo` are the slots that are
    not requested in it yet, `asked` says whether any was, and `waiting` are those of them that are not
    settled. `repeats` are the attempts that it repeats, by slot. `outcomes` are those of settled slots,
    sorted by slot when they are read. `usd` is the price of a provider's answers, `judged_usd` that of
    judges, and `spent` what the samples took of devices. `first_error` is the lowest slot with an error
    in this retry, and the error."""

    request: EvaluationRequested | None = None
    started: EvaluationStarted | None = None
    retry: int = 0
    todo: tuple[int, ...] = ()
    asked: bool = False
    waiting: frozenset[int] = frozenset()
    repeats: dict[int, tuple[int, ...]] = field(default_factory=dict)
    outcomes: dict[int, RowOutcome] = field(default_factory=dict)
    tokens: int = 0
    usd: float = 0.0
    judged_usd: float = 0.0
    spent: Spent = field(default_factory=dict)
    first_error: tuple[int, str] | None = None
    ended: bool = False


def evolve(state: EvalState, event: EvalEvent) -> EvalState:
    """Return the state after one event of the stream `eval-<id>`."""
    match event:
        case EvaluationRequested():
            return replace(state, request=event)
        case EvaluationStarted():
            return replace(state, started=event, todo=tuple(range(len(event.rows))))
        case EvaluationRetryRequested():
            return _begin_retry(state, event)
        case GroupsRequested():
            return _ask(state, event)
        case GroupsSettled():
            for group in event.groups:
                state = _count(state, group)
            return state
        case EvaluationCompleted():
            return replace(state, ended=True, waiting=frozenset())
        case EvaluationStopRequested():
            return state
        case _:
            assert_never(event)


def _ask(state: EvalState, event: GroupsRequested) -> EvalState:
    slots = {slot.slot: slot.attempts for slot in event.slots}
    return replace(
        state,
        asked=True,
        todo=tuple(slot for slot in state.todo if slot not in slots),
        waiting=state.waiting.union(slots),
        repeats={**state.repeats, **{slot: found for slot, found in slots.items() if found}},
    )


def _begin_retry(state: EvalState, event: EvaluationRetryRequested) -> EvalState:
    """The state in which the attempts that were left out are still to be requested."""
    rows = state.started.rows if state.started else ()
    return replace(
        state,
        retry=event.number,
        todo=tuple(slot for slot in range(len(rows)) if _left_out(state, slot)),
        asked=False,
        waiting=frozenset(),
        repeats={},
        first_error=None,
        ended=False,
    )


def _left_out(state: EvalState, slot: int) -> tuple[int, ...]:
    """The attempts of a slot that count nowhere; all of them before it is settled."""
    found = state.outcomes.get(slot)
    return found.left_out if found else tuple(range(_num_attempts(state)))


def _num_attempts(state: EvalState) -> int:
    return state.started.template.num_samples if state.started else 0


def _count(state: EvalState, group: SettledGroup) -> EvalState:
    slot = group.group.slot
    failures = [entry for entry in group.entries if entry.failure is not None]
    found = _error(failures) or group.dropped
    errors = [(slot, found)] if found else []
    errors += [state.first_error] if state.first_error else []
    return replace(
        state,
        waiting=state.waiting - {slot},
        outcomes={**state.outcomes, slot: _outcome(state, group)},
        tokens=state.tokens + sum(entry.completion_tokens for entry in group.entries),
        usd=state.usd + sum(entry.usd or 0.0 for entry in group.entries),
        judged_usd=state.judged_usd + (group.judged.usd if group.judged else 0.0),
        spent=add_spent([state.spent, group.spent]),
        first_error=min(errors, default=None),
    )


def _outcome(state: EvalState, group: SettledGroup) -> RowOutcome:
    """The attempts at the row of a group. Those of a retry take the places that it names."""
    slot, rewards = group.group.slot, group.group.rewards
    failed = failed_by_policy(entry.failure for entry in group.entries)
    before = state.outcomes.get(slot) or RowOutcome((None,) * _num_attempts(state))
    places = state.repeats.get(slot) if group.group.replacement else None
    if places is None:
        return RowOutcome(rewards, failed)
    merged = dict(enumerate(before.rewards)) | dict(zip(places, rewards, strict=False))
    new = {place for number, place in enumerate(places) if number in failed}
    return RowOutcome(tuple(merged.values()), before.failed.difference(places) | new)


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
        case EvaluationRequested() | EvaluationStopRequested() | EvaluationRetryRequested():
            return (eval_stream(message.evaluation),)


def handle(state: EvalState, message: EvalMessage, meta: Meta) -> Decision:
    """Decide what an evaluation does next: start, request rows, count a graded group, or end."""
    if isinstance(message, EvaluationRetryRequested):
        return _retry(state, message)
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


def _retry(state: EvalState, message: EvaluationRetryRequested) -> Decision:
    """Request the attempts that were left out, or end at once if there are none. The state may hold the
    message already."""
    if state.retry < message.number:
        state = evolve(state, message)
    if state.started is None or state.retry != message.number or state.ended or state.asked:
        return NOTHING
    return Decision(events=_request_chunk(state)) if state.todo else _result(state)


def _begin(state: EvalState, request: EvaluationRequested) -> Decision:
    if state.started is not None or request.workspace is not None:
        return NOTHING
    return _start(state, request, request.template.rollout)


def _start_with_workspace(state: EvalState, synced: WorkspaceSynced) -> Decision:
    request = state.request
    if state.started is not None or request is None or request.config is None:
        return NOTHING
    config = request.config
    try:
        rollout = rollout_of(
            config,
            entrypoint_of(config),
            synced.rollouts,
            snapshot=synced.snapshot,
            commit=synced.commit,
            workspace=request.workspace,
            submitter=request.submitter,
            num_samples=config.evaluation.n,
        )
    except Refused as error:
        return _end(state, "failed", error.message)
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
        decider=request.decider,
    )
    return Decision(events=(started, *_request_chunk(evolve(state, started))))


def _request_chunk(state: EvalState) -> tuple[GroupsRequested, ...]:
    """Return requests for the next chunk of rows, as many as the chunk needs. One request has rows with
    the same number of attempts."""
    started = state.started
    if started is None:
        return ()
    chunk = state.todo[: started.batch_size]
    by_number: dict[int, list[Slot]] = {}
    for slot in chunk:
        missing = _left_out(state, slot)
        attempts = missing if len(missing) < _num_attempts(state) else ()
        wanted = Slot(slot=slot, replacement=state.retry, row=started.rows[slot], attempts=attempts)
        by_number.setdefault(len(missing), []).append(wanted)
    return tuple(
        GroupsRequested(
            owner=started.evaluation,
            purpose=Purpose.EVALUATE,
            step=started.step or 0,
            slots=part,
            template=started.template.model_copy(update={"num_samples": number}),
        )
        for number, slots in sorted(by_number.items())
        for part in _parts(slots)
    )


def _parts(slots: list[Slot]) -> Iterator[tuple[Slot, ...]]:
    """Parts of the slots that each fit into one event."""
    most = max(1, MOST_SLOTS * SLOT_BYTES // (SLOT_BYTES + ATTEMPT_BYTES * len(slots[0].attempts)))
    for first in range(0, len(slots), most):
        yield tuple(slots[first : first + most])


def _settle_group(state: EvalState, message: GroupGraded) -> Decision:
    key = message.spec.group_key
    if key.replacement != state.retry or key.slot not in state.waiting:
        return NOTHING
    settled = GroupsSettled(
        owner=key.owner, purpose=key.purpose, step=key.step, groups=(settle(message),)
    )
    state = evolve(state, settled)
    if state.waiting:
        return Decision(events=(settled,))
    if not state.todo:
        return Decision(events=(settled, *_result(state).events))
    if over := _over_budget(state):
        return Decision(events=(settled, *_end(state, "failed", over).events))
    return Decision(events=(settled, *_request_chunk(state)))


def _over_budget(state: EvalState) -> str | None:
    """Why no more rows may be requested, or None."""
    provider = state.started.template.model.provider if state.started else None
    if provider is None or provider.max_usd is None or state.usd < provider.max_usd:
        return None
    return (
        f"the answers of {provider.name} cost {state.usd:.4f} US dollars, and advanced.max_usd is "
        f"{provider.max_usd:g}; raise it in another evaluation"
    )


def _result(state: EvalState) -> Decision:
    if all(reward is None for row in state.outcomes.values() for reward in row.rewards):
        why = state.first_error[1] if state.first_error else "the evaluation has no rows"
        return _end(state, "failed", f"no sample has a reward; the first error: {why}")
    return _end(state, "finished", None)


def _end(state: EvalState, status: str, message: str | None) -> Decision:
    request = state.started or state.request
    if request is None:
        return NOTHING
    mean, figures = evaluation_figures(
        state.outcomes, n=_num_attempts(state), threshold=request.pass_threshold
    )
    figures["eval/tokens"] = float(state.tokens)
    if state.usd:
        figures["eval/usd"] = state.usd
    ended = EvaluationCompleted.model_validate(
        {
            "evaluation": request.evaluation,
            "status": status,
            "reward": mean,
            "metrics": figures,
            "message": message,
            "run": request.run,
            "step": request.step,
            "spent": state.spent,
            "usd": state.usd + state.judged_usd,
        }
    )
    return Decision(events=(ended,))


CONSUMER: Consumer[EvalState, EvalEvent, EvalMessage, Never, Never] = Consumer(
    name=ConsumerName("evaluate"),
    category="eval",
    reads=get_args(EvalMessage),
    emits=(EvaluationStarted, GroupsRequested, GroupsSettled, EvaluationCompleted),
    effects=(),
    initial=EvalState(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    fold_version=5,
    snapshots=EvalState,
)
