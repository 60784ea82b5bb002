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
    """An effect this worker holds, under `epoch`. `spent`: its workers died too often (crashes over
    the limit); it must not be performed again but end as Failed(CRASH)."""

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
    """What a worker holds: effect -> epoch. `generation`: how often it has disowned claims."""

    generation: int
    claims: Mapping[EffectId, int]


class Disowned(Exception):
    """A claim was asked for under a generation that is over: nothing was claimed."""

    def __init__(self, worker: WorkerId, generation: int) -> None:
        super().__init__(f"{worker} claimed under generation {generation}, which is over")


class Effects(Protocol):
    """Claims and leases over the effect rows."""

    async def register(
        self, worker: WorkerId, *, host: str, pid: int, lease_s: float, lanes: Sequence[Lane] = ()
    ) -> None: ...
    async def renew(self, worker: WorkerId, *, lease_s: float) -> bool:
        """Extend the worker's lease. False when it has expired or was taken: stop performing."""
        ...

    async def expire(self, worker: WorkerId) -> None:
        """End a lease at once (its process is known to be dead, or leaves)."""
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
        """Claim due effects, within a lane of a consumer the one that is due the longest first: gate
        open, no live claim, and not held by this worker already. Epoch + 1 each; a claim taken over
        from a dead worker counts a crash. A worker whose own lease ran out gets nothing. Raises
        Disowned, with nothing claimed, when `generation` is not the worker's any more: a claim that a
        network delivers late must take nothing, for nobody would know of it."""
        ...

    async def retry(
        self, claimed: Claimed, *, delay_s: float, error: str, counted: bool = True
    ) -> None:
        """Give back for later: attempts + 1 if `counted`. Nothing happens if the claim was lost."""
        ...

    async def release(self, claimed: Claimed) -> None:
        """Give back without counting an attempt (pause, shutdown)."""
        ...

    async def holding(self, worker: WorkerId) -> Holding:
        """What the worker holds, and its generation (0 until it has disowned anything)."""
        ...

    async def disown(
        self, worker: WorkerId, *, generation: int, keep: Sequence[EffectId]
    ) -> int | None:
        """Give back, without counting anything, what the worker holds beyond `keep`: claims whose
        answers never reached it. In the same breath its generation is raised, so that those that are
        still on their way take nothing; returns the new one. None, with nothing given back, when
        `generation` is not the worker's: a call that comes late must not give back what it holds now."""
        ...

    async def save_memo(self, claimed: Claimed, memo: str) -> bool:
        """Remember something for a successor, under the epoch. False if the claim was lost."""
        ...

    async def gates(self, run_ids: Sequence[str]) -> Mapping[str, str]:
        """The gates of these runs (a run that is held is paused); one without a row is open."""
        ...

    async def next_due_s(
        self, worker: WorkerId, *, lanes: Sequence[Lane], consumers: Sequence[ConsumerName]
    ) -> float | None:
        """Seconds until there may be something to claim that is not there now: the next effect of these
        lanes and consumers is due, or the lease of another worker that holds any runs out. Or None."""
        ...

    async def depth(self) -> Mapping[str, int]:
        """Effects per lane that are waiting or claimed."""
        ...

    async def count_unfinished(
        self, *, lanes: Sequence[Lane], consumers: Sequence[ConsumerName]
    ) -> int:
        """How many effects of these lanes and consumers there are, waiting (be it for a later time) or
        claimed, but for those of runs that are paused, held or closed."""
        ...
