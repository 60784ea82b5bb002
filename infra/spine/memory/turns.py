"""The turns of effects and the deaths of their workers in memory, by the rules of `lane_turn`,
`next_turn` and `give_back_effects` in Postgres."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from infra.spine.ports.effects import NewEffect
from schemas.effects.effect import Effect, Lane
from schemas.ids import WorkerId

if TYPE_CHECKING:
    from infra.spine.memory.event_log import World


@dataclass
class EffectRow:
    """An effect as the table of effects holds it."""

    new: NewEffect
    order: int
    due_at: datetime
    turn: float = 0.0
    worker: WorkerId | None = None
    epoch: int = 0
    attempts: int = 0
    crashes: int = 0
    deaths: int = 0
    size: int = 1
    claimed_at: datetime | None = None
    wasted_s: float = 0.0


def lane_turn(world: "World", lane: Lane) -> float:
    """Return the largest turn of what is performed in a lane, else the smallest of what waits, else
    0."""
    ours = [row for row in world.effects.values() if row.new.effect.lane == lane]
    if performed := [row.turn for row in ours if row.worker is not None]:
        return max(performed)
    waiting = [row.turn for row in ours if world.gate(row.new.effect.run_id) == "open"]
    return min(waiting, default=0.0)


def next_turn(world: "World", effect: Effect) -> float:
    """Return the turn of an effect that is requested now."""
    ours = [row for row in world.effects.values() if row.new.effect.run_id == effect.run_id]
    last = max((row.turn for row in ours if row.new.effect.lane == effect.lane), default=0.0)
    return max(lane_turn(world, effect.lane), last) + share_of(world, effect)


def share_of(world: "World", effect: Effect) -> float:
    """Return by how much an effect moves the turns of its run."""
    return effect.size / world.weights.get(effect.run_id, 1)


def give_back_effects(world: "World", heir: WorkerId) -> None:
    """Give back what workers without a lease hold, except the heir. For each of these workers, the
    effect that most workers died with is blamed."""
    for dead in {row.worker for row in world.effects.values()} - {heir, None}:
        if dead is None or world.has_lease(dead):
            continue
        held = [row for row in world.effects.values() if row.worker == dead]
        blamed = min(held, key=lambda row: (-row.deaths, row.crashes, row.turn, row.order))
        blamed.crashes += 1
        until = min(world.now, world.workers.get(dead, world.now))
        for row in held:
            alike = sum(on_device(other) == on_device(row) for other in held)
            passed = (until - (row.claimed_at or until)).total_seconds()
            row.wasted_s += max(0.0, passed) / alike
        for row in held:
            row.worker = None
            row.size *= 2 if 1 <= row.deaths <= 16 else 1
            row.deaths += 1


def on_device(row: EffectRow) -> bool:
    """Whether an effect takes a device of its worker, beside which the others take the CPU."""
    return row.new.effect.lane in (Lane.GENERATE, Lane.TRAIN, Lane.SERVE)


def places_of_runs(world: "World", worker: WorkerId | None = None) -> Counter[tuple[str, Lane]]:
    """Return how many places of a lane each run takes in all workers, or in one."""
    taken: Counter[tuple[str, Lane]] = Counter()
    for row in world.effects.values():
        if row.worker is not None and worker in (None, row.worker):
            taken[row.new.effect.run_id, row.new.effect.lane] += row.size
    return taken
