"""The port to the effects: rows of work that workers claim under a lease."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from schemas.effects.effect import Effect, Lane
from schemas.ids import ConsumerName, EffectId, StreamName, WorkerId


@dataclass(frozen=True, slots=True)
class NewEffect:
    """An effect to write. With `claimed` it is born claimed: the worker that commits it holds it at
    once, with epoch 1."""

    effect: Effect
    consumer: ConsumerName
    stream: StreamName
    correlation: UUID
    traceparent: str | None = None
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class Claimed:
    """An effect that this worker holds. `epoch` is a counter that is raised each time the effect is
    claimed, so that a result with an older epoch is rejected. `crashes` counts the deaths of workers
    that it is blamed for, and `spent` means that they are too many. Then it must not be performed
    again, but end as Failed(CRASH). `size` is how many places of its lane it takes. `wasted_s` are the
    device-seconds of its earlier attempts, which were repeated or lost."""

    id: EffectId
    effect: Effect
    consumer: ConsumerName
    stream: StreamName
    epoch: int
    attempts: int
    crashes: int
    correlation: UUID
    traceparent: str | None
    spent: bool = False
    size: int = 1
    wasted_s: float = 0.0

    @classmethod
    def from_new(cls, new: NewEffect) -> "Claimed":
        """Return the claim of an effect that was born claimed."""
        return cls(
            id=new.effect.id,
            effect=new.effect,
            consumer=new.consumer,
            stream=new.stream,
            epoch=1,
            attempts=0,
            crashes=0,
            correlation=new.correlation,
            traceparent=new.traceparent,
            size=new.effect.size,
        )


@dataclass(frozen=True, slots=True)
class Holding:
    """The claims that a worker holds, as effect -> epoch. `generation` counts how often the worker has
    disowned claims."""

    generation: int
    claims: Mapping[EffectId, int]


class StaleGeneration(Exception):
    """A worker made a claim under one of its earlier generations. Nothing was claimed."""

    def __init__(self, worker: WorkerId, generation: int) -> None:
        super().__init__(f"worker {worker} claimed under generation {generation}, which is over")


class Effects(Protocol):
    """Claims and leases over the effect rows. A lease is a worker's time-limited right to hold
    claims."""

    async def register(
        self, worker: WorkerId, *, host: str, pid: int, lease_s: float, lanes: Sequence[Lane] = ()
    ) -> None:
        """Begin a lease of `lease_s` seconds for this worker, which takes these lanes."""
        ...

    async def renew(self, worker: WorkerId, *, lease_s: float) -> bool:
        """Extend the worker's lease by `lease_s` seconds from now. Returns False when the lease has
        expired or was ended. Then the worker must stop performing."""
        ...

    async def expire(self, worker: WorkerId) -> None:
        """End a lease at once, because its process is known to be dead or is about to exit."""
        ...

    async def claim(
        self,
        worker: WorkerId,
        *,
        room: Mapping[Lane, int],
        consumers: Sequence[ConsumerName],
        generation: int = 0,
        most: Mapping[Lane, int] | None = None,
        samples: int | None = None,
        spare: Mapping[Lane, int] | None = None,
    ) -> Sequence[Claimed]:
        """Claim due effects whose gate is open, that have no live claim, whose run needs no newer
        decider version than this worker's, and that this worker does not hold already. `room` has the
        lanes, and how many places each has left: effects are claimed as long as a place is left, and
        each takes `Claimed.size` places. Each claim raises the effect's epoch by one. A worker whose own
        lease has expired gets nothing.

        What dead workers held is given back first. A death counts one crash, however many effects the
        worker held: for the effect that most workers died with. An effect takes twice as many places
        with its second death and each further one. So what ends its workers is soon performed alone,
        and is the only one to blame. The time of the death since the claim counts as wasted, and is
        shared by what the worker held.

        Runs take turns within a lane of a consumer, by start-time fair queuing. An effect gets its turn
        when it is requested: `size / weight` after the last turn of its run, or after the turn of the
        lane, whichever is later. The smallest turn comes first. An effect keeps its turn when it is
        given back or tried again, and gets a new one when its run is resumed.

        `most` has the lanes of which one run may take only so many places, in all workers together.
        `samples` is how many places of the lane `generate` the runs of one workspace may take in all
        workers together, if the workspace has no quota of its own. An effect that is larger than the
        limit is claimed alone.

        `spare` has the lanes with further places, for effects near the head of the queue whose run then
        holds no more places of this worker than these. They are claimed only if all their places are
        left. When spare places are taken, `room` is below 0. A lane with one of the limits above has
        none.

        Raises StaleGeneration, with nothing claimed, when `generation` is not the worker's current one.
        A claim that the network delivers late must take nothing, because the worker would not know of
        it."""
        ...

    async def retry(
        self,
        claimed: Claimed,
        *,
        delay_s: float,
        error: str,
        counted: bool = True,
        wasted_s: float = 0.0,
    ) -> None:
        """Give an effect back, to be due in `delay_s` seconds. With `counted` this counts as an attempt.
        `wasted_s` are the device-seconds of the attempt. Nothing happens if the claim was lost."""
        ...

    async def release(self, claimed: Claimed, *, wasted_s: float = 0.0) -> None:
        """Give an effect back without counting an attempt, as for a pause or a shutdown. `wasted_s` are
        the device-seconds that it took so far."""
        ...

    async def holding(self, worker: WorkerId) -> Holding:
        """Return the worker's claims and its generation (0 until it has disowned claims)."""
        ...

    async def disown(
        self, worker: WorkerId, *, generation: int, keep: Sequence[EffectId]
    ) -> int | None:
        """Give back every claim of the worker that is not in `keep`, without counting an attempt. These
        are claims whose answers never reached the worker. The same transaction raises the worker's
        generation, so that claims that are still on their way take nothing. Returns the new generation.

        Returns None, with nothing given back, when `generation` is not the worker's current one. A call
        that arrives late must not give back what the worker holds now."""
        ...

    async def gates(self, run_ids: Sequence[str]) -> Mapping[str, str]:
        """Return the gates of these runs. The gate of a held run is `paused`, and that of a run without
        a row is `open`."""
        ...

    async def runs_of_newer(self, run_ids: Collection[str]) -> frozenset[str]:
        """Return those of these runs and evaluations that need a newer decider version than that of this
        process (`schemas/events/decider_version.py`). The answer for a run never changes."""
        ...

    async def next_due_s(
        self, worker: WorkerId, *, lanes: Sequence[Lane], consumers: Sequence[ConsumerName]
    ) -> float | None:
        """Return the seconds until more effects of these lanes and consumers may become claimable,
        because the next one is due then, or because the lease of another worker that holds effects
        expires. None if neither lies ahead."""
        ...

    async def has_unfinished(
        self, *, lanes: Sequence[Lane], consumers: Sequence[ConsumerName]
    ) -> bool:
        """Whether effects of these lanes and consumers are waiting (some for a later time) or claimed.
        Effects of runs that are paused, held or closed, or left for a newer release, do not count."""
        ...
