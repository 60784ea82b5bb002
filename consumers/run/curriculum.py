"""The curriculum of a run: which rows are in a pool, and which rows a step has. Pure functions.

The groups of step s are requested when version s - 1 - depth is settled, so the pools of step s follow
from the groups of the steps up to that one, and from no others. Groups of later steps may be graded
earlier or later, and change nothing. PoolsDecided records each decision, and GroupsRequested the rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from schemas.datasets import Curriculum, Pool
from schemas.errors import POLICY_FAILURES
from schemas.events import PoolsDecided, SettledGroup
from trainer import schedule

Moves = dict[int, Pool | None]
"""Row -> the pool that it goes to; None if it leaves its pool."""


@dataclass(frozen=True, slots=True)
class RowPools:
    """The pools of a run.

    - `position` is how many places of the shuffled dataset were visited.
    - `pools` are the rows in pools, up to the decision of the newest step that is not open any more.
    - `moves` are the decisions of later steps.
    - `measured` are the samples that passed and those that count, by step and row, until a step that
      was decided from them is closed.
    - `warned` are the warnings that were given.
    - `before` is the position before the decision of each step in `moves`, and the last step that it
      was decided from.
    """

    position: int = 0
    pools: dict[int, Pool] = field(default_factory=dict)
    moves: dict[int, Moves] = field(default_factory=dict)
    measured: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    warned: frozenset[str] = frozenset()
    before: dict[int, tuple[int, int]] = field(default_factory=dict)

    def as_of(self, step: int) -> dict[int, Pool]:
        """The rows that were in a pool when the rows of `step` were chosen, which is an open step."""
        found = self.pools
        for decided in sorted(self.moves):
            if decided <= step:
                found = move_rows(found, self.moves[decided])
        return found


def move_rows(pools: Mapping[int, Pool], moves: Moves) -> dict[int, Pool]:
    """The rows in pools after some have moved."""
    moved = {**pools, **moves}
    return {row: pool for row, pool in moved.items() if pool is not None}


def measure(
    pools: RowPools,
    curriculum: Curriculum,
    *,
    step: int,
    row: int,
    group: SettledGroup,
    times: int = 1,
) -> RowPools:
    """Count the samples of a group that passed. A sample that failed because of what the policy wrote
    has not passed, whatever `failed_reward` says. Any other sample without a reward does not count.
    With `times` of -1 a group that was counted is taken out again."""
    results = []
    for entry, reward in zip(group.entries, group.group.rewards, strict=False):
        if entry.failure in POLICY_FAILURES:
            results.append(False)
        elif reward is not None:
            results.append(curriculum.is_pass(reward))
    if not results:
        return pools
    rows = pools.measured.get(step, {})
    passed, counted = rows.get(row, (0, 0))
    new = {**rows, row: (passed + times * sum(results), counted + times * len(results))}
    if not new[row][1]:
        del new[row]
    return replace(pools, measured={**pools.measured, step: new})


def decide_moves(
    pools: RowPools, curriculum: Curriculum, *, step: int, measured_up_to: int
) -> Moves:
    """The rows that change their pool for `step`, by the newest of the groups of the steps up to
    `measured_up_to`."""
    now, newest = pools.as_of(step), dict[int, tuple[int, int]]()
    for measured in sorted(pools.measured):
        if measured <= measured_up_to:
            newest |= pools.measured[measured]
    found = {row: curriculum.pool_of(passed / count) for row, (passed, count) in newest.items()}
    return {row: found[row] for row in sorted(found) if found[row] != now.get(row)}


def record_decision(pools: RowPools, event: PoolsDecided) -> RowPools:
    """The pools after a decision."""
    moves: Moves = dict.fromkeys(event.easy, "easy")
    moves |= dict.fromkeys(event.hard, "hard")
    moves |= dict.fromkeys(event.left)
    return replace(
        pools,
        position=event.position,
        moves={**pools.moves, event.step: moves},
        before={**pools.before, event.step: (pools.position, event.measured_up_to)},
    )


def close_step(pools: RowPools, step: int) -> RowPools:
    """The pools after a step has its batch. Nobody asks for those of this step again, and what it was
    decided from is used up."""
    if step not in pools.moves:
        return pools
    _, used = pools.before[step]
    return replace(
        pools,
        pools=pools.as_of(step),
        moves={decided: moves for decided, moves in pools.moves.items() if decided > step},
        before={decided: place for decided, place in pools.before.items() if decided > step},
        measured={at: rows for at, rows in pools.measured.items() if at > used},
    )


def rewind(pools: RowPools, step: int) -> RowPools:
    """The pools as they were when `step`, which is closed, was the newest that was decided, with the
    results of all groups up to it. A fork decides about later steps again."""
    undone = [place for decided, place in pools.before.items() if decided > step]
    return replace(
        pools,
        position=min((position for position, _ in undone), default=pools.position),
        moves={decided: moves for decided, moves in pools.moves.items() if decided <= step},
        before={decided: place for decided, place in pools.before.items() if decided <= step},
        measured={at: rows for at, rows in pools.measured.items() if at <= step},
    )


def choose_rows(
    pools: Mapping[int, Pool],
    shares: Mapping[Pool, int],
    *,
    seed: int,
    step: int,
    num_groups: int,
    num_rows: int,
    position: int,
) -> tuple[tuple[int, ...], int]:
    """The rows of a step in the order of its slots, and the new position.

    Each pool gives its share. The other rows are in no pool, and are the next ones of the shuffled
    dataset. If there are too few of these, rows of the pools take their place. No row occurs twice as
    long as the dataset has enough rows."""
    drawn: list[int] = []
    for pool, share in shares.items():
        own = sorted(row for row, its in pools.items() if its == pool)
        drawn += _draw(own, min(share, num_groups - len(drawn)), key=f"{seed}/{step}/{pool}")
    wanted = num_groups - len(drawn)
    others, position = _next_rows(
        pools, most=wanted, seed=seed, num_rows=num_rows, position=position
    )
    rest = sorted(set(pools) - set(drawn))
    filled = _draw(rest, wanted - len(others), key=f"{seed}/{step}/rest")
    rows = [*others, *drawn, *filled]
    if len(others) < num_groups:  # rows of pools must not always be in the last slots
        rows = _draw(rows, len(rows), key=f"{seed}/{step}/slots")
    return tuple(rows[place % len(rows)] for place in range(num_groups)), position


def _draw(rows: Sequence[int], most: int, *, key: str) -> list[int]:
    """At most so many of these rows, in a random order that the key determines."""
    places = range(max(0, min(most, len(rows))))
    return [rows[schedule.shuffled_index(place, len(rows), key=key)] for place in places]


def _next_rows(
    pools: Mapping[int, Pool], *, most: int, seed: int, num_rows: int, position: int
) -> tuple[list[int], int]:
    """The next `most` different rows that are in no pool, or all of these if there are fewer."""
    num_normal = num_rows - len(pools)
    wanted = min(most, num_normal)
    if num_normal**2 < wanted * num_rows:  # fewer rows to look for than places to look at
        normal = (row for row in range(num_rows) if row not in pools)
        at = {
            schedule.next_position(row, seed=seed, num_rows=num_rows, position=position): row
            for row in normal
        }
        first = sorted(at)[:wanted]
        return [at[place] for place in first], first[-1] + 1 if first else position
    found: dict[int, None] = {}
    while len(found) < wanted:
        row = schedule.row_at(position, seed=seed, num_rows=num_rows)
        position += 1
        if row not in pools:
            found[row] = None
    return list(found), position


def pool_sizes(pools: Mapping[int, Pool], num_rows: int) -> dict[str, int]:
    """The number of rows in each pool, and in none (`normal`)."""
    hard = sum(pool == "hard" for pool in pools.values())
    return {"easy": len(pools) - hard, "hard": hard, "normal": num_rows - len(pools)}


def pools_warning(event: PoolsDecided, curriculum: Curriculum, *, wanted: int) -> str:
    """Say that too few rows, or none at all, are left outside of the pools, and what to change."""
    num_rows = event.num_easy + event.num_hard + event.num_normal
    found = ", ".join(_parts(event, curriculum))
    if event.num_normal:
        which = (
            f"{event.num_normal} of the {num_rows} rows are in no pool, and step {event.step} wants"
        )
        return (
            f"only {which} {wanted} ({found}); rows of the pools take the other places. Use more rows, "
            "or widen the range from min_pass_rate to max_pass_rate"
        )
    never = event.num_hard == num_rows
    cure = (
        "check the grader's rewards, set advanced.curriculum.pass_reward to a reward that samples get, "
        "or use easier rows"
        if never
        else "use other rows, or widen the range from min_pass_rate to max_pass_rate"
    )
    return (
        f"all {num_rows} rows are in the pools ({found}), so step {event.step} has rows of the pools "
        f"again; {cure}"
    )


def _parts(event: PoolsDecided, curriculum: Curriculum) -> Iterator[str]:
    if event.num_easy:
        yield f"{event.num_easy} above max_pass_rate {curriculum.max_pass_rate:g}"
    if event.num_hard:
        yield f"{event.num_hard} below min_pass_rate {curriculum.min_pass_rate:g}"


def rows_of(moves: Moves, pool: Pool | None) -> tuple[int, ...]:
    """The rows that go to this pool, in order."""
    return tuple(sorted(row for row, its in moves.items() if its == pool))
