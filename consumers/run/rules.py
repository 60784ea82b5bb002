"""The rules of a run: which events follow from its state. The same state always gives the same events.

Each rule returns the events of at most one decision. `follow` folds them and tries the rules again,
until none returns anything. So a stop, a pause or a late fact needs no code path of its own.
"""

from collections.abc import Callable, Mapping, Sequence

from consumers.run.health import (
    FLAT_STEPS,
    MOST_LOST,
    MOST_UNHEALTHY,
    all_failed_message,
    all_lost_message,
    divergence_message,
    failures_warning,
    flat_warning,
    frequent_failure,
    masked_warning,
    never_trained_message,
)
from consumers.run.requests import due_groups, pool_metrics, replacement_slots
from consumers.run.settle import FLAT, batch_of, is_lost, metrics
from consumers.run.spending import exhausted_message, find_exhausted
from consumers.run.state import Due, OpenStep, RunEvent, RunState, evolve
from schemas.algorithms import failed_rewards, replacements, samples_nothing
from schemas.events import (
    BatchAssembled,
    CheckpointRequested,
    EvaluationRequested,
    GroupsRequested,
    RunFailed,
    RunFinished,
    RunPaused,
    RunResumed,
    RunStopped,
    RunWarned,
    SettledGroup,
    StepSettled,
    StepSkipped,
)
from schemas.ids import Purpose
from schemas.sampling import PolicyRef
from schemas.specs import CheckpointSpec
from trainer import schedule

Rule = Callable[[RunState], tuple[RunEvent, ...]]


def follow(state: RunState) -> tuple[RunEvent, ...]:
    """Return all events that follow from `state`, in order."""
    events: list[RunEvent] = []
    while not state.ended:
        new = next((found for rule in RULES if (found := rule(state))), ())
        if not new:
            break
        for event in new:
            state = evolve(state, event)
        events += new
    return tuple(events)


def give_up(state: RunState) -> tuple[RunEvent, ...]:
    """Fail the run when several steps in a row leave the weights unchanged."""
    run = _run_id(state)
    if state.lost >= MOST_LOST and state.first_error is not None:
        text = all_lost_message(state.lost, state.first_error)
        return (RunFailed(run=run, kind="error", message=text),)
    if state.unhealthy < MOST_UNHEALTHY:
        return ()
    text = divergence_message(state.settled, run=run, checkpoint=state.checkpointed)
    return (RunFailed(run=run, kind="error", message=text),)


def warn(state: RunState) -> tuple[RunEvent, ...]:
    """Warn when several steps in a row left nothing to learn, because their rewards were equal or all
    answers were cut off, and at the end of a run of which that is true for every step."""
    is_all = state.flat == state.settled == state.total > 0
    if not (state.flat == FLAT_STEPS or is_all) or state.warned >= state.settled:
        return ()
    say = masked_warning if state.masked == state.flat else flat_warning
    text = say(state.settled, num_steps=state.flat)
    return (RunWarned(run=_run_id(state), step=state.settled, message=text),)


def checkpoint(state: RunState) -> tuple[RunEvent, ...]:
    """Request one checkpoint at a time, oldest first, because each names its parent's manifest."""
    if state.checkpointing is not None or not state.checkpoints_due or state.started is None:
        return ()
    return (_request_checkpoint(state, state.checkpoints_due[0]),)


def stop(state: RunState) -> tuple[RunEvent, ...]:
    """Stop as soon as the learner is idle, with a final checkpoint of the last version."""
    run = _run_id(state)
    if not state.stop_wanted or state.checkpointing is not None:
        return ()
    if state.settled < 0:
        return (RunStopped(run=run, step=0),)
    if not state.may_stop or state.last is None:
        return ()
    if state.settled in (0, state.checkpointed):
        return (RunStopped(run=run, step=state.settled),)
    if state.last.state.durable:
        return (_request_checkpoint(state, state.last),)
    return ()


def validate(state: RunState) -> tuple[RunEvent, ...]:
    """Request a validation before step 1, every `eval_interval` steps, and after the last step."""
    started = state.started
    if started is None or started.validation is None or state.state is None:
        return ()
    step = state.settled
    if step <= state.evaluated or not _is_validated(state, step):
        return ()
    if state.stop_wanted and step != state.total:
        return ()
    if step > 0 and state.state.weights is None:
        return ()  # a version without its weights would be mistaken for the base model
    policy = PolicyRef(version=step, weights=state.state.weights)
    return (
        EvaluationRequested(
            evaluation=f"{started.run}v{step}",
            eval_name=f"{started.run}v{step}",
            template=started.validation.model_copy(update={"policy": policy}),
            rows=tuple(range(started.validation.dataset.num_rows)),
            batch_size=VALIDATION_GROUPS,
            run=started.run,
            step=step,
            decider=state.request.decider if state.request else 1,
        ),
    )


def keep_budget(state: RunState) -> tuple[RunEvent, ...]:
    """Pause before the step that would pass the budget."""
    ends = state.settled >= state.total or state.stop_wanted or state.paused
    if ends or not state.at_boundary:
        return ()
    run, step = _run_id(state), state.settled
    found = find_exhausted(
        state.spending,
        state.budget,
        state.prices,
        run=run,
        step=step,
        validations=len(state.evaluating) + _is_validated(state, step + 1),
    )
    if found is None:
        return ()
    return (found, RunPaused(run=run, step=step, reason=exhausted_message(found)))


VALIDATION_GROUPS = 64
"""How many groups of a validation are requested at once."""


def pause(state: RunState) -> tuple[RunEvent, ...]:
    """Pause at a step boundary, and resume from the same boundary."""
    run = _run_id(state)
    if state.paused and (state.resume_wanted or state.stop_wanted):
        return (RunResumed(run=run, step=max(0, state.settled)),)
    if state.pause_wanted and state.at_boundary and not state.stop_wanted:
        return (RunPaused(run=run, step=state.settled),) if not state.paused else ()
    return ()


def finish(state: RunState) -> tuple[RunEvent, ...]:
    """Finish after the last step, the last checkpoint and the last validation. A run that trained
    nothing because of errors fails instead."""
    over = state.settled == state.total > 0 and not state.stop_wanted
    open_ends = state.checkpoints_due or state.checkpointing is not None or state.evaluating
    if not over or open_ends or state.paused:
        return ()
    if not state.trained and state.first_error is not None:
        text = never_trained_message(state.first_error)
        return (RunFailed(run=_run_id(state), kind="error", message=text),)
    finished = RunFinished(
        run=_run_id(state),
        step=state.settled,
        reward=state.last.reward if state.last else None,
        held_out=state.held_out,
        held_out_intervals=state.held_out_intervals,
        deploy_as=state.started.spec.config.deploy_as if state.started else None,
    )
    return (finished,)


def assemble_batch(state: RunState) -> tuple[RunEvent, ...]:
    """Fix the batch of the next step, once all its groups are settled."""
    step = state.settled + 1
    opened = state.open.get(step)
    if opened is None or not opened.complete or state.training is not None or _is_resting(state):
        return ()
    groups = [opened.settled[slot] for slot in sorted(opened.settled)]
    all_groups = (*groups, *opened.replaced)
    kept = batch_of(groups, most=state.batch_size)
    figures = metrics(all_groups, newest=state.settled) | pool_metrics(state, step)
    if opened.num_slots > state.batch_size:
        num_usable = sum(group.dropped is None for group in groups)
        figures["rollout/spare_groups"] = float(num_usable - len(kept))
    run = _run_id(state)
    warned = _warn_of_failures(state, step, all_groups, figures)
    if kept:
        return (
            *warned,
            BatchAssembled(
                run=run,
                step=step,
                groups=kept,
                metrics=figures,
                durable=_must_be_durable(state, step),
                sampled=_sampled_version(state, opened),
            ),
        )
    skipped = _skip_step(state, step, opened, figures)
    is_over = any(isinstance(event, RunFailed) for event in skipped)
    return skipped if is_over else (*warned, *skipped)  # the failure has the reason already


def _sampled_version(state: RunState, opened: OpenStep) -> PolicyRef | None:
    """Return the version that sampled a step, if the run tests its samples."""
    if state.started is None or not state.started.spec.attests or opened.template is None:
        return None
    return opened.template.policy


def _warn_of_failures(
    state: RunState, step: int, groups: Sequence[SettledGroup], figures: Mapping[str, float]
) -> tuple[RunEvent, ...]:
    """Warn when many samples of a step failed, once for each category of the most frequent failure."""
    category = frequent_failure(figures)
    if category is None or category in state.failing or state.started is None:
        return ()
    entries = (entry for group in groups for entry in group.entries)
    examples = (entry.message for entry in entries if entry.failure == category)
    lost = (
        group.dropped for group in groups if group.dropped and group.dropped.startswith(category)
    )
    run = _run_id(state)
    text = failures_warning(
        figures,
        step=step,
        run=run,
        category=category,
        example=next((text for text in (*examples, *lost) if text), ""),
        kept=category in failed_rewards(state.started.spec.config.advanced),
    )
    return (RunWarned(run=run, step=step, message=text, about="failures", category=category),)


def request_groups(state: RunState) -> tuple[RunEvent, ...]:
    """Request the groups of every step that is due now, or fix the rows of the next batch where the run
    samples nothing."""
    if state.started is None or state.settled < 0 or not _may_go_on(state):
        return ()
    if samples_nothing(state.started.spec.config.advanced):
        return _assemble_rows(state)
    return tuple(due_groups(state))


def resample(state: RunState) -> tuple[RunEvent, ...]:
    """Request another row for each slot whose group was filtered, at the step's own policy version,
    until the run's limit is reached (DAPO's dynamic sampling)."""
    if state.started is None or state.stop_wanted or state.paused:
        return ()
    most = replacements(state.started.spec.config.advanced)
    for step in sorted(state.open):
        slots = replacement_slots(state, step, most=most)
        template = state.open[step].template
        if slots and template is not None:
            request = GroupsRequested(
                owner=state.started.run,
                purpose=Purpose.TRAIN,
                step=step,
                slots=slots,
                template=template,
            )
            return (request,)
    return ()


RULES: tuple[Rule, ...] = (
    give_up,
    warn,
    checkpoint,
    stop,
    validate,
    keep_budget,
    pause,
    finish,
    resample,
    assemble_batch,
    request_groups,
)


def _may_go_on(state: RunState) -> bool:
    """Whether another step may begin. After a stop request a step begins only if it makes a durable
    version."""
    if _is_resting(state) or state.settled >= state.total or _awaits_first_validation(state):
        return False
    return not state.stop_wanted or (state.at_boundary and state.settled + 1 not in state.open)


def _awaits_first_validation(state: RunState) -> bool:
    """Whether a run with a budget waits until it knows what a validation costs."""
    is_unknown = state.spending.validation is None and bool(state.evaluating)
    return is_unknown and bool(state.budget.limits) and not state.stop_wanted


def _is_resting(state: RunState) -> bool:
    """Whether no further step is taken, although its groups may exist already: the run is paused, or it
    is about to stop with the version that it has."""
    if state.paused or not state.stop_wanted or not state.may_stop:
        return state.paused
    return state.settled == 0 or state.state is None or state.state.durable


def _assemble_rows(state: RunState) -> tuple[RunEvent, ...]:
    if not state.at_boundary or state.started is None:
        return ()
    plan, step = state.started.plan, state.settled + 1
    seed = state.started.spec.config.advanced.seed
    rows = schedule.step_rows(seed, step=step, batch=plan.batch_size, num_rows=plan.num_rows)
    return (
        BatchAssembled(
            run=_run_id(state), step=step, rows=tuple(rows), durable=_must_be_durable(state, step)
        ),
    )


def _must_be_durable(state: RunState, step: int) -> bool:
    """Whether the version of `step` must be stored whole, because something will read it."""
    if state.started is None or state.stop_wanted or _is_validated(state, step):
        return True
    every = state.started.spec.config.checkpoints.checkpoint_save_freq
    return step % every == 0 or step == state.total


def _is_validated(state: RunState, step: int) -> bool:
    if state.started is None or state.started.validation is None:
        return False
    every = state.started.spec.config.checkpoints.eval_interval
    return step in (0, state.total) or (every is not None and step % every == 0)


def _skip_step(
    state: RunState, step: int, opened: OpenStep, figures: dict[str, float]
) -> tuple[RunEvent, ...]:
    run = _run_id(state)
    in_order = [opened.settled[slot] for slot in sorted(opened.settled)]
    reasons = [group.dropped for group in in_order if is_lost(group)]
    reason = reasons[0] if reasons and reasons[0] else FLAT
    if reasons and figures["rollout/failed_ratio"] == 1.0:
        return (RunFailed(run=run, kind="error", message=all_failed_message(step, reason)),)
    if state.state is None or state.last is None:
        return ()
    settled = StepSettled(
        run=run,
        step=step,
        state=state.state,
        metrics=figures,
        skipped=True,
        batch=state.last.batch,
        plan=state.last.plan,
        versions=state.last.versions,
    )
    return (StepSkipped(run=run, step=step, reason=reason), settled)


def _request_checkpoint(state: RunState, due: Due) -> CheckpointRequested:
    started = state.started
    assert started is not None  # noqa: S101 - a version exists, so the run has started
    config = started.spec.config
    return CheckpointRequested(
        run=started.run,
        spec=CheckpointSpec(
            run=started.run,
            step=due.step,
            model=started.spec.model,
            tuning=config.advanced.tuning,
            state=due.state,
            batch=due.batch,
            plan=due.plan,
            versions=due.versions,
            seed=config.advanced.seed,
            parent=state.manifest,
            files=state.files,
            weights_name=state.weights_name,
        ),
        reward=due.reward,
    )


def _run_id(state: RunState) -> str:
    return state.request.run if state.request else ""
