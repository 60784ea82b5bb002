"""The schedule of a run: which groups to request now, with which policy version, and for which dataset
row. All functions are pure, and none imports torch.

A group of step s pins the version that it samples with: max(0, s - 1 - depth), rounded down to a
multiple of the weight sync interval. So the batch of a step does not depend on what finishes first, and
a trained token is at most depth + interval - 1 versions old. Depth 0 is sync, 1 is one_step_off_async,
and a larger depth is fully_async.

Steps are trained in order, and each step waits for its groups however long they take. No group is
discarded because it is late. The lag is bounded because no step further than `depth` ahead is requested.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from math import gcd

from schemas.limits import FULLY_ASYNC_DEPTH as FULLY_ASYNC_DEPTH
from schemas.limits import Pace as Pace
from schemas.limits import pace_of as pace_of
from schemas.specs import Slot

ROUNDS = 6


def steps_due(pace: Pace, *, settled: int, requested: int, total: int) -> tuple[int, ...]:
    """The steps whose groups can be requested now, in order. `settled` is the newest version,
    `requested` is the last step that was requested, and `total` is the number of steps in the run. At
    most depth + 1 steps are open at a time, so the version that each of them pins exists."""
    return tuple(range(requested + 1, min(total, settled + 1 + pace.depth) + 1))


def may_be_pinned(pace: Pace, version: int, *, requested: int) -> bool:
    """Whether groups that are not requested yet may still pin this version."""
    return version % pace.interval == 0 and version >= pace.pinned_version(requested + 1)


def replacement(
    seed: int,
    *,
    step: int,
    slot: int,
    number: int,
    rows: Sequence[int],
    num_rows: int,
    skipped: Collection[int] = (),
) -> Slot:
    """The replacement for a slot after `number` of its groups were dropped, in a step that began with
    these rows. It depends on the arguments, and not on the order in which groups are dropped. The
    replacements of a step have one order of the rows that the step does not have, so that none repeats
    another as long as there are more, and a slot gets each of them before one comes again. If the step
    has all rows, a slot gets those of the slots after it, and its own one last. `skipped` rows are not
    used, unless there are no others."""
    own = tuple(dict.fromkeys(rows))
    taken = {*own, *skipped} if len({*own, *skipped}) < num_rows else {*own}
    num_free = num_rows - len(taken)
    if not num_free:
        place = own.index(rows[slot]) + number
        return Slot(slot=slot, replacement=number, row=own[place % num_rows])
    # A slot comes back to its first place after so many numbers, and then goes on from the next one.
    batch = len(rows)
    num_places = num_free // gcd(batch, num_free)
    place = ((number - 1) * batch + slot + (number - 1) // num_places) % num_free
    order = (
        shuffled_index(index, num_rows, key=f"{seed}/{step}/replacement")
        for index in range(num_rows)
    )
    row = next(islice((row for row in order if row not in taken), place, None))
    return Slot(slot=slot, replacement=number, row=row)


def step_rows(seed: int, *, step: int, batch: int, num_rows: int) -> Iterator[int]:
    """The dataset rows of a step. Each epoch visits every row once, in its own order. A step may
    continue from one epoch into the next."""
    for position in range((step - 1) * batch, step * batch):
        yield row_at(position, seed=seed, num_rows=num_rows)


def row_at(position: int, *, seed: int, num_rows: int) -> int:
    """The row at a position (from 0) of the epochs, one after another."""
    epoch, index = divmod(position, num_rows)
    return shuffled_index(index, num_rows, key=f"{seed}/{epoch}")


def next_position(row: int, *, seed: int, num_rows: int, position: int) -> int:
    """The first place of the shuffled dataset, from `position` on, that has this row (`row_at`)."""
    epoch, index = divmod(position, num_rows)
    place = shuffled_place(row, num_rows, key=f"{seed}/{epoch}")
    if place < index:
        epoch += 1
        place = shuffled_place(row, num_rows, key=f"{seed}/{epoch}")
    return epoch * num_rows + place


def shuffled_index(index: int, size: int, *, key: str) -> int:
    """The image of `index` under a permutation of range(size) that `key` determines. The permutation is
    a Feistel network over the next power of four, applied until the result is below `size` (Black and
    Rogaway 2002, "cycle walking")."""
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mix(key, number, right) & mask)
        index = left << half | right
        if index < size:
            return index


def shuffled_place(row: int, size: int, *, key: str) -> int:
    """The index whose image under the permutation of `shuffled_index` is `row`."""
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = row >> half, row & mask
        for number in reversed(range(ROUNDS)):
            left, right = right ^ (_mix(key, number, left) & mask), left
        row = left << half | right
        if row < size:
            return row


def _mix(key: str, number: int, half: int) -> int:
    """The round function of the permutation: 64 bits that a half determines."""
    mixed = hashlib.blake2b(f"{key}/{number}/{half}".encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "big")
