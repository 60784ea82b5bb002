"""The state of a run: what is in flight and what comes next. It keeps no history."""

from dataclasses import dataclass, field, replace
from typing import assert_never

from consumers.run.curriculum import RowPools, close_step, measure, record_decision, rewind
from consumers.run.health import is_flat, is_masked, is_unhealthy
from consumers.run.open_steps import Due as Due
from consumers.run.open_steps import OpenStep as OpenStep
from consumers.run.open_steps import ValidationReward
from consumers.run.settle import is_lost
from consumers.run.spending import (
    RunSpending,
    spending_of_groups,
    spending_of_step,
    spending_of_validation,
)
from infra.readmodel.estimates import Interval, interval_of
from schemas.algorithms import is_offline
from schemas.artifact_refs import ArtifactRef
from schemas.costs.budget import Budget, Spending
from schemas.costs.prices import Prices
from schemas.events import (
    BatchAssembled,
    BudgetExhausted,
    CheckpointRequested,
    CheckpointSettled,
    EvaluationRequested,
    EvaluationSettled,
    GroupsRequested,
    GroupsSettled,
    PoolsDecided,
    RunApproved,
    RunArchived,
    RunDeleted,
    RunFailed,
    RunFinished,
    RunPaused,
    RunPauseRequested,
    RunRejected,
    RunRenamed,
    RunRequested,
    RunRestored,
    RunResumed,
    RunResumeRequested,
    RunStarted,
    RunStopped,
    RunStopRequested,
    RunWarned,
    StepSettled,
    StepSkipped,
)
from schemas.ids import REFUTED
from schemas.models.fork import ForkPoint
from schemas.specs import StateRef
from trainer import schedule

RunEvent = (
    RunRequested
    | RunApproved
    | RunRejected
    | RunStarted
    | PoolsDecided
    | GroupsRequested
    | GroupsSettled
    | BatchAssembled
    | StepSkipped
    | StepSettled
    | RunWarned
    | CheckpointRequested
    | CheckpointSettled
    | EvaluationRequested
    | EvaluationSettled
    | RunPauseRequested
    | BudgetExhausted
    | RunPaused
    | RunResumeRequested
    | RunResumed
    | RunStopRequested
    | RunStopped
    | RunFailed
    | RunFinished
    | RunRenamed
    | RunArchived
    | RunRestored
    | RunDeleted
)


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of one run.

    - `settled` is the last settled step; -1 while version 0 does not exist.
    - `requested` is the last step whose groups were requested.
    - `pools` are those of its curriculum, if it has one.
    - `training` is the step whose batch the learner has.
    - `weights` are those of the versions that later groups may still sample with.
    - `evaluated` is the last step whose validation was requested.
    - `unhealthy`, `flat`, `masked` and `lost` count steps in a row (`consumers/run/health.py`).
    - `first_error` is why the first lost step could not be trained.
    - `trained` says whether any step was trained.
    - `warned` is the last step that a warning named.
    - `alarms` are the alarms about the sampler that were recorded.
    - `failing` are the categories of failures of which a warning said that they are frequent.
    - `first_reward` and `last_reward` are the rewards of the validations of the first and of the last
      step that has one.
    - `approved` says whether a person approved a run that waits for it.
    - `rules` are those that a fork has from its parent (`TrainSpec.rules`).
    - `assembled` is the step whose batch the learner has, as it was when the batch was fixed.
    - `refuted` counts the warnings about refuted samples of each server since the run last resumed.
    - `raised` are the limits of its budget that were raised.
    - `spending` is what it has spent.
    """

    request: RunRequested | None = None
    started: RunStarted | None = None
    settled: int = -1
    settled_at: float | None = None
    state: StateRef | None = None
    last: Due | None = None
    files: dict[str, ArtifactRef] = field(default_factory=dict)
    weights_name: str = ""
    weights: dict[int, ArtifactRef | None] = field(default_factory=dict)
    requested: int = 0
    open: dict[int, OpenStep] = field(default_factory=dict)
    pools: RowPools = field(default_factory=RowPools)
    training: int | None = None
    batch_metrics: dict[str, float] = field(default_factory=dict)
    skips: frozenset[int] = frozenset()
    unhealthy: int = 0
    flat: int = 0
    masked: int = 0
    lost: int = 0
    first_error: str | None = None
    trained: bool = False
    warned: int = -1
    alarms: tuple[str, ...] = ()
    failing: frozenset[str] = frozenset()
    checkpoints_due: tuple[Due, ...] = ()
    checkpointing: int | None = None
    checkpointed: int | None = None
    manifest: str | None = None
    evaluated: int = -1
    evaluating: frozenset[int] = frozenset()
    first_reward: ValidationReward | None = None
    last_reward: ValidationReward | None = None
    approved: bool = False
    assembled: OpenStep | None = None
    refuted: dict[str, int] = field(default_factory=dict)
    raised: Budget = field(default_factory=Budget)
    spending: RunSpending = field(default_factory=RunSpending)
    pause_wanted: bool = False
    resume_wanted: bool = False
    paused: bool = False
    stop_wanted: bool = False
    ended: bool = False
    rules: int | None = None

    @property
    def waits_for_approval(self) -> bool:
        return self.request is not None and self.request.needs_approval and not self.approved

    @property
    def held_out(self) -> tuple[float, float] | None:
        """The rewards of the first and of the last validation, if there were two."""
        first, last = self.first_reward, self.last_reward
        if first is None or last is None or first.step == last.step:
            return None
        return first.reward, last.reward

    @property
    def held_out_intervals(self) -> tuple[Interval, Interval] | None:
        """The 95 % intervals of `held_out`, if both are known."""
        ends = [end.interval for end in (self.first_reward, self.last_reward) if end]
        if self.held_out is None or ends[0] is None or ends[1] is None:
            return None
        return ends[0], ends[1]

    @property
    def budget(self) -> Budget:
        """The limits in force: those of its config, and those that were raised."""
        return self.request.config.budget.with_limits(self.raised) if self.request else Budget()

    @property
    def prices(self) -> Prices:
        """The prices of the time when the run was requested."""
        return (self.request.prices if self.request else None) or Prices()

    @property
    def total(self) -> int:
        return self.started.plan.total_steps if self.started else 0

    @property
    def batch_size(self) -> int:
        """The most groups of a batch."""
        return self.started.plan.batch_size if self.started else 0

    @property
    def pace(self) -> schedule.Pace:
        """How far sampling runs ahead. Before the run has started, this is the pace of sync mode."""
        return schedule.pace_of(self.started.spec.config) if self.started else schedule.Pace(0)

    @property
    def at_boundary(self) -> bool:
        """Whether the run can pause here: version `settled` exists and the learner is idle. In sync
        mode the step that is being sampled is finished first. Asynchronous modes always have samples
        that were generated ahead, and keep them."""
        return self.may_stop and (self.pace.depth > 0 or self.requested == self.settled)

    @property
    def may_stop(self) -> bool:
        """Whether the run can stop here: version `settled` exists and the learner is idle. What is being
        sampled is dropped."""
        return self.settled >= 0 and self.training is None


def evolve(state: RunState, event: RunEvent) -> RunState:
    """Return the state after one event of the stream `run-<id>`."""
    match event:
        case RunRequested():
            begun = state if event.fork is None else _rebase(state, event.fork)
            return replace(begun, request=event)
        case RunApproved():
            return replace(state, approved=True)
        case RunStarted():
            return replace(state, started=event)
        case PoolsDecided():
            return replace(state, pools=record_decision(state.pools, event))
        case GroupsRequested() if event.step == state.training and state.assembled is not None:
            return _open_again(state, state.assembled, event)
        case GroupsRequested():
            opened = {**state.open, event.step: _open_step(state.open.get(event.step), event)}
            requested = max(state.requested, event.step)
            return _forget_weights(replace(state, requested=requested, open=opened))
        case GroupsSettled():
            return _settle_groups(state, event)
        case BatchAssembled():
            left = {step: group for step, group in state.open.items() if step != event.step}
            return replace(
                state,
                open=left,
                pools=close_step(state.pools, event.step),
                training=event.step,
                assembled=state.open.get(event.step),
                trained=True,
                lost=0,
                requested=max(state.requested, event.step),
                batch_metrics=event.metrics,
            )
        case StepSkipped():
            return _skip_step(state, event)
        case StepSettled():
            return _settle_step(state, event)
        case CheckpointRequested():
            due = tuple(d for d in state.checkpoints_due if d.step != event.spec.step)
            return replace(state, checkpoints_due=due, checkpointing=event.spec.step)
        case CheckpointSettled():
            return replace(
                state,
                spending=state.spending.add(Spending(event.spent)),
                checkpointing=None,
                checkpointed=event.step,
                manifest=event.manifest_sha256,
            )
        case EvaluationRequested():
            step = event.step or 0
            return replace(
                state,
                evaluated=max(state.evaluated, step),
                evaluating=state.evaluating | {step},
            )
        case EvaluationSettled():
            return _settle_evaluation(state, event)
        case RunPauseRequested():
            return replace(state, pause_wanted=True)
        case RunResumeRequested():
            raised = state.raised.with_limits(event.budget or Budget())
            return replace(state, pause_wanted=False, resume_wanted=state.paused, raised=raised)
        case BudgetExhausted():
            return state
        case RunPaused():
            return replace(state, paused=True, pause_wanted=False)
        case RunResumed():
            return replace(state, paused=False, resume_wanted=False, refuted={})
        case RunStopRequested():
            return replace(state, stop_wanted=True)
        case RunRejected() | RunStopped() | RunFailed() | RunFinished():
            return replace(state, ended=True)
        case RunArchived() | RunDeleted():
            return replace(state, ended=True)
        case RunRenamed() | RunRestored():
            return state
        case RunWarned(about="sampler"):
            return replace(state, alarms=(*state.alarms, event.message))
        case RunWarned(about="failures"):
            return replace(state, failing=state.failing | {event.category or ""})
        case RunWarned(about="fork"):
            return state
        case RunWarned(about="refuted", category=server):
            number = state.refuted.get(server or "", 0) + 1
            return replace(state, refuted={**state.refuted, server or "": number})
        case RunWarned(about="pools"):
            warned = state.pools.warned | {event.category or ""}
            return replace(state, pools=replace(state.pools, warned=warned))
        case RunWarned():
            return replace(state, warned=max(state.warned, event.step))
        case _:
            assert_never(event)


def _rebase(parent: RunState, point: ForkPoint) -> RunState:
    """Return the state that a fork begins with, from that of its parent right after the step was
    settled. It keeps what was learned, measured and warned of. What the parent had requested and what
    was asked of it is dropped, and so are the versions of its policy, which PolicyInitialized names. If
    the first reward is not known at this place, the fork may measure its first version itself."""
    is_measured = parent.first_reward is not None
    return RunState(
        pools=rewind(parent.pools, point.step),
        unhealthy=parent.unhealthy,
        flat=parent.flat,
        masked=parent.masked,
        lost=parent.lost,
        first_error=parent.first_error,
        trained=parent.trained,
        warned=parent.warned,
        alarms=parent.alarms,
        failing=parent.failing,
        manifest=parent.manifest,
        evaluated=point.step if is_measured else point.step - 1,
        first_reward=parent.first_reward,
        last_reward=parent.last_reward,
        rules=parent.started.spec.rules if parent.started else None,
    )


def _forget_weights(state: RunState) -> RunState:
    """Return the state without the weights that no later group samples with."""
    pace, requested = state.pace, state.requested
    kept = {
        v: w
        for v, w in state.weights.items()
        if schedule.may_be_pinned(pace, v, requested=requested)
    }
    return replace(state, weights=kept)


def _open_step(step: OpenStep | None, event: GroupsRequested) -> OpenStep:
    """Return a step whose groups are requested for the first time, or again in some of its slots."""
    if step is None:
        rows = tuple(slot.row for slot in event.slots)
        return OpenStep(len(rows), template=event.template, rows=rows)
    again = {slot.slot: slot.replacement for slot in event.slots}
    replaced = [
        step.settled[slot.slot]
        for slot in event.slots
        if slot.slot in step.settled and slot.replacement < REFUTED
    ]
    return replace(
        step,
        settled={slot: group for slot, group in step.settled.items() if slot not in again},
        numbers={**step.numbers, **again},
        replacing={**step.replacing, **{slot.slot: slot.row for slot in event.slots}},
        replaced=(*step.replaced, *replaced),
    )


def _open_again(state: RunState, step: OpenStep, event: GroupsRequested) -> RunState:
    """Return the state after samples of the batch that the learner has were refuted: their step is open
    again, as if these groups had not been settled."""
    pools = state.pools
    curriculum = state.started.spec.config.advanced.curriculum if state.started else None
    if curriculum is not None and curriculum.has_pools:
        for slot in event.slots:
            group, row = step.settled[slot.slot], step.row_of(slot.slot)
            pools = measure(pools, curriculum, step=event.step, row=row, group=group, times=-1)
    opened = {**state.open, event.step: _open_step(step, event)}
    return replace(state, open=opened, pools=pools, training=None, assembled=None)


def _settle_groups(state: RunState, event: GroupsSettled) -> RunState:
    state = replace(state, spending=state.spending.add(spending_of_groups(event)))
    step = state.open.get(event.step)
    if step is None:
        return state
    settled = {**step.settled, **{group.group.slot: group for group in event.groups}}
    new = replace(state, open={**state.open, event.step: replace(step, settled=settled)})
    curriculum = state.started.spec.config.advanced.curriculum if state.started else None
    if curriculum is None or not curriculum.has_pools:
        return new
    pools = state.pools
    for group in event.groups:
        row = step.row_of(group.group.slot)
        pools = measure(pools, curriculum, step=event.step, row=row, group=group)
    return replace(new, pools=pools)


def _skip_step(state: RunState, event: StepSkipped) -> RunState:
    """Return the state after a step without a batch. The step is lost if errors made all its groups
    unusable."""
    opened = state.open.get(event.step)
    left = {step: group for step, group in state.open.items() if step != event.step}
    if opened is None:
        return state  # it was trained, and changed nothing
    state = replace(state, pools=close_step(state.pools, event.step))
    if not all(is_lost(group) for group in opened.settled.values()):
        return replace(state, open=left, lost=0)
    first = state.first_error or f"step {event.step}: {event.reason}"
    return replace(state, open=left, lost=state.lost + 1, first_error=first)


def _settle_step(state: RunState, event: StepSettled) -> RunState:
    due = Due(
        step=event.step,
        state=event.state,
        batch=event.batch,
        plan=event.plan,
        versions=event.versions,
        reward=event.metrics.get("rollout/raw_reward"),
    )
    is_first = state.settled < 0
    earlier = {one.step: one.weights for one in event.weights}
    new = replace(
        state,
        settled=event.step,
        settled_at=event.at,
        requested=max(state.requested, event.step),
        state=event.state,
        last=due,
        training=None if state.training == event.step else state.training,
        assembled=None if state.training == event.step else state.assembled,
        files=event.files or state.files,
        weights_name=event.weights_name or state.weights_name,
        weights={**state.weights, **earlier, event.step: event.state.weights},
        spending=_settle_spending(state, event),
    )
    if is_first:
        return _forget_weights(new)
    new = _forget_weights(_count_health(new, event))
    if _on_cadence(new) and event.state.durable:
        return replace(new, checkpoints_due=(*new.checkpoints_due, due))
    return new


def _settle_spending(state: RunState, event: StepSettled) -> RunSpending:
    counts_rows = state.started is not None and is_offline(state.started.spec.config.advanced)
    part = spending_of_step(event, counts_rows=counts_rows)
    spending = state.spending.add(part)
    return spending.begin() if state.settled < 0 else spending.settle_step()


def _settle_evaluation(state: RunState, event: EvaluationSettled) -> RunState:
    """Validations may end in another order than their steps."""
    spending = state.spending.add_validation(spending_of_validation(event))
    new = replace(state, evaluating=state.evaluating - {event.step}, spending=spending)
    if event.reward is None:
        return new
    interval = interval_of(event.metrics, "eval/reward")
    reward = ValidationReward(event.step, event.reward, interval)
    first, last = state.first_reward, state.last_reward
    return replace(
        new,
        first_reward=reward if first is None or event.step < first.step else first,
        last_reward=reward if last is None or event.step > last.step else last,
    )


def _count_health(state: RunState, event: StepSettled) -> RunState:
    """Count the steps in a row that changed nothing, and those that had nothing to learn from. A step
    that trained nothing says nothing about the learner's health."""
    if state.started is None:
        return state
    advanced = state.started.spec.config.advanced
    unhealthy = state.unhealthy if event.skipped else 0
    masked = is_masked(event.metrics, advanced)
    return replace(
        state,
        unhealthy=state.unhealthy + 1 if is_unhealthy(event.metrics) else unhealthy,
        flat=state.flat + 1 if masked or is_flat(event.metrics, advanced) else 0,
        masked=state.masked + 1 if masked else 0,
    )


def _on_cadence(state: RunState) -> bool:
    if state.started is None or state.settled < 1:
        return False
    every = state.started.spec.config.checkpoints.checkpoint_save_freq
    return state.settled % every == 0 or state.settled == state.total
