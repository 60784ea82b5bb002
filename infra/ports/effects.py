"""The port to the effects: rows of work that workers claim under a lease."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from schemas.effects import Effect, Lane
from schemas.ids import ConsumerName, EffectId, StreamName, WorkerId


@dataclass(frozen=True, slots=True)
class NewEffect:
    """An effect to write. `claimed`: born claimed by the worker that commits it, with epoch 1."""

    effect: Effect
    consumer: ConsumerName
    stream: StreamName
    correlation: UUID
    traceparent: str | None = None
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class Claimed:
    """An effect that this worker holds, under `epoch`: a counter raised each time the effect is claimed,
    so that a result with an older epoch is rejected. `spent`: its workers died too often (`crashes` is
    over the limit), so it must not be performed again, but end as Failed(CRASH)."""

    id: EffectId
    effect: Effect
    consumer: ConsumerName
    stream: StreamName
    epoch: int
    attempts: int
    crashes: int
    correlation: UUID
    traceparent: str | None
    memo: str | None = None
    spent: bool = False

    @classmethod
    def from_new(cls, new: NewEffect) -> "Claimed":
        """The claim of an effect that was born claimed."""
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
        )


@dataclass(frozen=True, slots=True)
class Holding:
    """What a worker holds, as effect -> epoch. `generation`: how often it has disowned claims."""

    generation: int
    claims: Mapping[EffectId, int]


class StaleGeneration(Exception):
    """A worker claimed under a generation of its own that is over. Nothing was claimed."""

    def __init__(self, worker: WorkerId, generation: int) -> None:
        super().__init__(f"worker {worker} claimed under generation {generation}, which is over")


class Effects(Protocol):
    """Claims and leases over the effect rows. A lease is a worker's time-limited right to hold
    claims."""

    async def register(
        self, worker: WorkerId, *, host: str, pid: int, lease_s: float, lanes: Sequence[Lane] = ()
    ) -> None:
        """Begin a lease of this worker, which takes these lanes."""
        ...

    async def renew(self, worker: WorkerId, *, lease_s: float) -> bool:
        """Extend the worker's lease. False when it has expired or was taken: then stop performing."""
        ...

    async def expire(self, worker: WorkerId) -> None:
        """End a lease at once, because its process is known to be dead, or leaves."""
        ...

    async def claim(
        self,
        worker: WorkerId,
        *,
        lanes: Sequence[Lane],
        consumers: Sequence[ConsumerName],
        limit: int,
        generation: int = 0,
    ) -> Sequence[Claimed]:
        """Claim due effects whose gate is open, that have no live claim, and that this worker does not
        hold already. Within a lane of a consumer, the effect that is due the longest comes first. Each
        epoch is raised by one, and a claim taken over from a dead worker counts a crash. A worker whose
        own lease expired gets nothing.

        Raises StaleGeneration, with nothing claimed, when `generation` is not the worker's any more. A
        claim that a network delivers late must take nothing, because nobody would know of it."""
        ...

    async def retry(
        self, claimed: Claimed, *, delay_s: float, error: str, counted: bool = True
    ) -> None:
        """Give an effect back for later, with one more attempt if `counted`. Nothing happens if the
        claim was lost."""
        ...

    async def release(self, claimed: Claimed) -> None:
        """Give an effect back without counting an attempt, as for a pause or a shutdown."""
        ...

    async def holding(self, worker: WorkerId) -> Holding:
        """What the worker holds, and its generation (0 until it has disowned claims)."""
        ...

    async def disown(
        self, worker: WorkerId, *, generation: int, keep: Sequence[EffectId]
    ) -> int | None:
        """Give back, without counting anything, what the worker holds beyond `keep`: these are claims
        whose answers never reached it. The same transaction raises the worker's generation, so that
        claims that are still on their way take nothing. Returns the new generation.

        Returns None, with nothing given back, when `generation` is not the worker's: a call that comes
        late must not give back what the worker holds now."""
        ...

    async def save_memo(self, claimed: Claimed, memo: str) -> bool:
        """Save a note for the next claim of this effect. False if this claim was lost."""
        ...

    async def gates(self, run_ids: Sequence[str]) -> Mapping[str, str]:
        """The gates of these runs. A run that is held is paused, and one without a row is open."""
        ...

    async def next_due_s(
        self, worker: WorkerId, *, lanes: Sequence[Lane], consumers: Sequence[ConsumerName]
    ) -> float | None:
        """Seconds until there may be something to claim that cannot be claimed now: the next effect of
        these lanes and consumers is due, or the lease of another worker that holds some expires. None if
        nothing of that kind lies ahead."""
        ...

    async def depth(self) -> Mapping[str, int]:
        """The number of effects per lane that are waiting or claimed."""
        ...

    async def count_unfinished(
        self, *, lanes: Sequence[Lane], consumers: Sequence[ConsumerName]
    ) -> int:
        """How many effects of these lanes and consumers are waiting (some for a later time) or claimed.
        Those of runs that are paused, held or closed do not count."""
        ...
