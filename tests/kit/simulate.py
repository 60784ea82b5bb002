"""The real deciders over an in-memory log, with scripted outcomes, delivered in any way a bus may.

With `apart` each consumer is a process of its own, otherwise one process hosts all of them. The test
chooses what is delivered, delivered again, or performed next.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from consumers.registry import REGISTRY, load
from infra.spine.memory.event_log import MemoryEffects, MemoryLog, World
from infra.spine.ports.effects import Claimed
from infra.spine.ports.event_log import CommitMiss, Recorded
from infra.spine.runtime.cascade import Delivery, Drafter
from infra.spine.runtime.consumer import AnyConsumer
from infra.spine.runtime.folded_states import StateCache
from infra.spine.runtime.newer_runs import NewerRuns
from schemas.effects import (
    CommitFetched,
    Effect,
    FetchCommit,
    GenerateGroup,
    GenerateSample,
    GradeGroup,
    GroupSampled,
    GroupScored,
    InitializePolicy,
    ManifestPut,
    Outcome,
    PolicyBuilt,
    SampleFinished,
    SaveCheckpoint,
    TrainStep,
)
from schemas.events import Event
from schemas.ids import ConsumerName, EventId, WorkerId
from schemas.sampling import Grade
from schemas.specs import DiscoveredRollout, Entrypoint, SampleEntry
from tests.kit.decider import NOW
from tests.kit.specs import ref, version

CAUSE = UUID(int=11)
WORKER = WorkerId("simulated")
UUIDS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def outcome_of(effect: Effect) -> Outcome:
    """The outcome of performing `effect`: a function of the effect alone."""
    match effect:
        case FetchCommit():
            found = DiscoveredRollout(
                entrypoint=Entrypoint(rollout="say"), workflow="Say", grader="Count"
            )
            return CommitFetched(effect, commit="c" * 40, snapshot=ref("tree"), rollouts=(found,))
        case InitializePolicy():
            return PolicyBuilt(effect, state=version(0), files={"f": ref("f")})
        case GenerateSample():
            return SampleFinished(effect, artifact=ref(effect.key), entry=_entry(effect.index))
        case GenerateGroup():
            entries = tuple(_entry(n) for n in range(effect.spec.template.num_samples))
            return GroupSampled(effect, artifact=ref(effect.key), entries=entries)
        case GradeGroup():
            grades = tuple(
                Grade(index=entry.index, reward=float(entry.index)) for entry in effect.entries
            )
            return GroupScored(effect, group_artifact=ref(effect.key), grades=grades)
        case TrainStep():
            return PolicyBuilt(effect, state=version(effect.step), metrics={"train/loss": 0.5})
        case SaveCheckpoint():
            return ManifestPut(effect, manifest=ref(effect.key))
        case _:
            raise AssertionError(effect.type)


def _entry(index: int) -> SampleEntry:
    return SampleEntry(index=index, prompt_tokens=4, completion_tokens=3, num_turns=1)


def stream_texts(world: World) -> list[str]:
    """All streams as sorted payloads, without ids, and without the order of independent facts."""
    return sorted(
        f"{r.stream} {r.event.type} {UUIDS.sub('*', r.event.model_dump_json())}"
        for r in world.events
    )


@dataclass
class Process:
    """One process: the consumers that it hosts, and the states of streams that it has cached."""

    world: World
    consumers: tuple[AnyConsumer, ...]
    log: MemoryLog = field(init=False)
    states: StateCache = field(init=False)
    drafter: Drafter = field(init=False)

    def __post_init__(self) -> None:
        self.log = MemoryLog(self.world)
        self.states = StateCache(self.log)
        self.drafter = Drafter(
            self.consumers,
            self.states,
            newer_runs=NewerRuns(MemoryEffects(self.world)),
            now=lambda: NOW,
            reserve=lambda effect: False,
        )

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        """Decide and write, as the runtime does."""
        while deliveries:
            draft = await self.drafter.draft(deliveries)
            try:
                await self.log.commit(draft.commit(WORKER))
            except CommitMiss:
                self.states.forget(draft.states)
                keys = [(d.consumer.name, EventId(d.id)) for d in deliveries if not d.claimed]
                gone = await self.log.filter_consumed(keys)
                deliveries = [
                    d
                    for d in deliveries
                    if (d.consumer.name, d.id) not in gone
                    and not (d.claimed and d.claimed.id not in self.world.effects)
                ]
                continue
            self.states.remember(draft.states)
            return


@dataclass
class Simulation:
    """A world with its processes."""

    world: World = field(default_factory=World)
    processes: list[Process] = field(default_factory=list)
    delivered: Counter[tuple[ConsumerName, EventId]] = field(default_factory=Counter)

    @classmethod
    async def begin(cls, events: Sequence[Event], *, apart: bool) -> "Simulation":
        """A world to which an edge has appended `events`. With `apart` each consumer is a process of its
        own."""
        simulation = cls()
        consumers = tuple(load(name) for name in REGISTRY)
        hosted = [(consumer,) for consumer in consumers] if apart else [consumers]
        simulation.processes = [Process(simulation.world, group) for group in hosted]
        await MemoryLog(simulation.world).append(events, cause=CAUSE)
        return simulation

    def host(self, name: ConsumerName) -> Process:
        return next(p for p in self.processes if name in {c.name for c in p.consumers})

    def deliverable(self, copies: int = 0) -> list[tuple[AnyConsumer, Recorded]]:
        """The records that a consumer reads and has not consumed, or to which they were not delivered
        `copies` times."""
        consumers = [consumer for p in self.processes for consumer in p.consumers]
        return [
            (consumer, recorded)
            for recorded in self.world.events
            for consumer in consumers
            if type(recorded.event) in consumer.reads
            and consumer.routes(recorded.event)
            and (
                (consumer.name, recorded.id) not in self.world.inbox
                or self.delivered[consumer.name, recorded.id] < copies
            )
        ]

    async def deliver(self, consumer: AnyConsumer, recorded: Recorded) -> None:
        self.delivered[consumer.name, recorded.id] += 1
        delivery = Delivery(consumer, recorded.event, recorded.id, recorded.correlation)
        await self.host(consumer.name).settle([delivery])

    async def perform(self, number: int) -> None:
        """Claim the effect at this place and settle its outcome."""
        effect_id = list(self.world.effects)[number]
        held = self.world.effects[effect_id]
        held.worker, held.epoch = WORKER, held.epoch + 1
        process = self.host(held.new.consumer)
        claimed = Claimed(
            id=effect_id,
            effect=held.new.effect,
            consumer=held.new.consumer,
            stream=held.new.stream,
            epoch=held.epoch,
            attempts=0,
            crashes=0,
            correlation=held.new.correlation,
            traceparent=None,
        )
        consumer = next(c for c in process.consumers if c.name == claimed.consumer)
        outcome = outcome_of(claimed.effect)
        await process.settle(
            [Delivery(consumer, outcome, claimed.id, claimed.correlation, claimed=claimed)]
        )

    async def run(self, choose: Callable[[int], int], *, copies: int = 0) -> None:
        """Continue until nothing is left, and everything was delivered `copies` times. `choose(n)` picks
        one of n things to do next."""
        for _ in range(5000):
            ready = self.deliverable(copies)
            todo = len(ready) + len(self.world.effects)
            if not todo:
                return
            number = choose(todo)
            if number < len(ready):
                await self.deliver(*ready[number])
            else:
                await self.perform(number - len(ready))
        raise AssertionError("the simulation does not end after 5000 things done")

    async def deliver_all_again(self) -> None:
        """Deliver every record once more, as a broker does that has lost its offsets. Only the inbox
        knows that they were consumed."""
        for process in self.processes:
            for consumer in process.consumers:
                for recorded in list(self.world.events):
                    if type(recorded.event) in consumer.reads and consumer.routes(recorded.event):
                        process.states.forget([recorded.stream])
                        await self.deliver(consumer, recorded)

    def stream_texts(self) -> list[str]:
        return stream_texts(self.world)
