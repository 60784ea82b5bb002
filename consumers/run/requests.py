"""Which groups a run requests next, with which policy version and for which rows. Pure functions of the
run's state."""

from collections.abc import Iterator

from consumers.run.curriculum import (
    choose_rows,
    decide_moves,
    move_rows,
    pool_sizes,
    pools_warning,
    rows_of,
)
from consumers.run.refuted import fenced_servers
from consumers.run.settle import FLAT
from consumers.run.state import RunEvent, RunState, evolve
from schemas.datasets import Curriculum, Pool
from schemas.events import GroupsRequested, PoolsDecided, RunStarted, RunWarned
from schemas.ids import REFUTED, Purpose
from schemas.limits import groups_per_step
from schemas.sampling import PolicyRef
from schemas.specs import Slot
from trainer import schedule


def due_groups(state: RunState) -> Iterator[RunEvent]:
    """Request the groups of every step that is due, each after the decision about its pools."""
    started = state.started
    if started is None or started.template is None:
        return
    plan, pace = started.plan, state.pace
    steps = schedule.steps_due(
        pace, settled=state.settled, requested=state.requested, total=plan.total_steps
    )
    for step in steps:
        version = pace.pinned_version(step)
        policy = PolicyRef(version=version, weights=state.weights[version])
        decided, rows = _choose_rows(state, step)
        for event in decided:
            state = evolve(state, event)
        yield from decided
        yield GroupsRequested(
            owner=started.run,
            purpose=Purpose.TRAIN,
            step=step,
            slots=tuple(Slot(slot=slot, row=row) for slot, row in enumerate(rows)),
            template=started.template.model_copy(
                update={
                    "policy": policy,
                    "replay_of": _recorded_by(started, version),
                    "avoid": fenced_servers(state),
                }
            ),
        )


def _recorded_by(started: RunStarted, version: int) -> str | None:
    """Return the run whose recorded samples may be used by groups that sample with a version: the parent
    of a fork that replays them, whose weights these are up to the step of the fork."""
    point = started.fork
    is_shared = point is not None and point.replay_samples and version <= point.step
    return point.parent if point is not None and is_shared else None


def _choose_rows(state: RunState, step: int) -> tuple[tuple[RunEvent, ...], tuple[int, ...]]:
    """Return the rows of a step, and the decision about its pools where the run has some."""
    started = state.started
    assert started is not None  # noqa: S101 - a step is due, so the run has started
    config, num_rows = started.spec.config, started.plan.num_rows
    curriculum, seed = config.advanced.curriculum, config.advanced.seed
    num_groups = groups_per_step(config)
    if curriculum is None or not curriculum.has_pools:
        rows = schedule.step_rows(seed, step=step, batch=num_groups, num_rows=num_rows)
        return (), tuple(rows)
    measured = max(0, step - 1 - state.pace.depth)
    moves = decide_moves(state.pools, curriculum, step=step, measured_up_to=measured)
    pools = move_rows(state.pools.as_of(step), moves)
    chosen, position = choose_rows(
        pools,
        curriculum.shares(step, num_groups),
        seed=seed,
        step=step,
        num_groups=num_groups,
        num_rows=num_rows,
        position=state.pools.position,
    )
    sizes = pool_sizes(pools, num_rows)
    decided = PoolsDecided(
        run=started.run,
        step=step,
        measured_up_to=measured,
        position=position,
        easy=rows_of(moves, "easy"),
        hard=rows_of(moves, "hard"),
        left=rows_of(moves, None),
        num_easy=sizes["easy"],
        num_hard=sizes["hard"],
        num_normal=sizes["normal"],
    )
    return (decided, *_warn_of_pools(state, decided, curriculum, num_groups)), chosen


def _warn_of_pools(
    state: RunState, decided: PoolsDecided, curriculum: Curriculum, num_groups: int
) -> tuple[RunEvent, ...]:
    """Warn once when the rows in no pool are too few for a step, and once when there are none."""
    sizes: dict[Pool, int] = {"easy": decided.num_easy, "hard": decided.num_hard}
    shares = curriculum.shares(decided.step, num_groups)
    wanted = num_groups - sum(min(shares[pool], size) for pool, size in sizes.items())
    category = "few" if decided.num_normal else "none"
    if decided.num_normal >= wanted or category in state.pools.warned:
        return ()
    text = pools_warning(decided, curriculum, wanted=wanted)
    run, step = decided.run, decided.step
    return (RunWarned(run=run, step=step, message=text, about="pools", category=category),)


def replacement_slots(state: RunState, step: int, *, most: int) -> tuple[Slot, ...]:
    """Return the slots of `step` whose group was filtered and was replaced fewer than `most` times, each
    with the row that replaces it."""
    started, opened = state.started, state.open[step]
    filtered = [
        group.group
        for _, group in sorted(opened.settled.items())
        if group.dropped == FLAT and group.group.replacement % REFUTED < most
    ]
    if started is None or not filtered:
        return ()
    skipped = state.pools.as_of(step)
    return tuple(
        schedule.replacement(
            started.spec.config.advanced.seed,
            step=step,
            slot=group.slot,
            number=group.replacement % REFUTED + 1,
            rows=opened.rows,
            num_rows=started.plan.num_rows,
            skipped=skipped,
        )
        for group in filtered
    )


def pool_metrics(state: RunState, step: int) -> dict[str, float]:
    """Return how many rows were in each pool when the rows of an open step were chosen."""
    started = state.started
    curriculum = started.spec.config.advanced.curriculum if started else None
    if started is None or curriculum is None or not curriculum.has_pools:
        return {}
    sizes = pool_sizes(state.pools.as_of(step), started.plan.num_rows)
    return {f"pool/{name}": float(size) for name, size in sizes.items()}
