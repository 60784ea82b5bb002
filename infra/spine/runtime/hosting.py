"""The consumers that decide in a process, and the effects that it performs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from infra.spine.runtime.consumer import AnyConsumer
from schemas.effects.effect import Effect, Lane
from schemas.ids import WorkerId

COORDINATION = 1024
"""The places of a lane whose work waits for others and needs little of this machine."""

PER_CORE = 4
USER_BYTES = 256 << 20
"""The graders per core, and the memory for each of them. A grader mostly waits, for its judge or for its
sandbox. The smaller of the two numbers counts."""

FEWEST_USER = 4

SHARE_OF_SPARE = 6
"""An engine gets a sixth more samples than it computes at once, but only of runs of which it has few.
So a small run does not wait until samples of a large one have ended, which they do many at a time."""


@dataclass(frozen=True, slots=True)
class Hosting:
    """The part of the work that a process hosts: its consumers, its lanes, and how many places each lane
    has. `run_capacity` has the lanes of which one run may take only so many places, in all processes
    together. `spare` has the lanes with further places, for runs that then hold no more of the lane than
    these. `workspace_samples` is how many samples in flight a workspace may have that has no quota of
    its own, or None. An effect takes `Claimed.size` places while this process holds it. `devices` is the
    kind of device of each lane that does not run on the CPU."""

    worker: WorkerId
    consumers: tuple[AnyConsumer, ...]
    lanes: tuple[Lane, ...]
    capacity: Mapping[Lane, int] = field(default_factory=dict)
    run_capacity: Mapping[Lane, int] = field(default_factory=dict)
    spare: Mapping[Lane, int] = field(default_factory=dict)
    workspace_samples: int | None = None
    devices: Mapping[Lane, str] = field(default_factory=dict)

    def performs(self, effect: Effect) -> bool:
        """Whether this process has the lane of an effect, and the consumer that performs it."""
        return effect.lane in self.lanes and any(
            type(effect) in consumer.effects for consumer in self.consumers
        )

    def is_limited(self, lane: Lane) -> bool:
        """Whether only a claim can tell which effects of a lane may be performed now: a run has a limit,
        or a workspace may have one, which an administrator can set at any time."""
        return lane is Lane.GENERATE or lane in self.run_capacity

    def places(self, lane: Lane) -> int:
        """Return how many places a lane has."""
        return self.capacity.get(lane, COORDINATION)


def capacity_of(chosen: Mapping[str, int], *, generate: int | None) -> dict[Lane, int]:
    """Return the places of each lane of a process: what it computes at once, so that an effect that it
    holds waits for nothing. `generate` is how many samples its engine computes at once (None: it has no
    engine), and `chosen` is what the operator sets."""
    found = {Lane.TRAIN: 1, Lane.EXPORT: 1, Lane.USER: _user_places()}
    if generate is not None:
        found[Lane.GENERATE] = generate
    return found | {Lane(lane): places for lane, places in chosen.items()}


def spare_of(chosen: Mapping[str, int], *, generate: int | None) -> dict[Lane, int]:
    """Return the spare places of each lane. A lane whose places the operator sets has none."""
    if generate is None or Lane.GENERATE in chosen:
        return {}
    return {Lane.GENERATE: generate // SHARE_OF_SPARE}


def _user_places() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return max(FEWEST_USER, min(PER_CORE * cores, memory // USER_BYTES))
