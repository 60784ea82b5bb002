"""A runtime over in-memory adapters with consumers of the test's own, driven until nothing is left."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

from infra.blobs.artifacts import ArtifactStore
from infra.blobs.dataset_cache import DatasetCache
from infra.blobs.memory import MemoryBlobs
from infra.settings.settings import Settings
from infra.spine.memory.bus import MemoryBus
from infra.spine.memory.event_log import MemoryEffects, MemoryLog, World
from infra.spine.ports.clock import SystemClock
from infra.spine.ports.event_log import Encoded, Recorded
from infra.spine.postgres.errors import DatabaseUnavailable
from infra.spine.postgres.notify import Wakeup
from infra.spine.runtime.consumer import AnyConsumer, Consumer, Decision, Meta
from infra.spine.runtime.hosting import Hosting
from infra.spine.runtime.runtime import Runtime
from schemas.effects import Failed, FetchCommit, Lane, Outcome
from schemas.events import CheckpointFailed, Event, MessageDeadLettered, RunWarned
from schemas.ids import ConsumerName, StreamName, WorkerId, checkpoint_stream
from schemas.specs import CommitSpec
from tests.kit.commits import commit_of
from tests.kit.ports import AllPorts

WORKER = WorkerId("w")


@dataclass(frozen=True, slots=True)
class Fetched(Outcome):
    """The outcome of the bench's effect."""

    effect: FetchCommit


@dataclass
class Script:
    """Functions that the bench's consumer calls. Each may raise an error."""

    on_event: Callable[[RunWarned], None] = lambda event: None
    on_outcome: Callable[[Fetched | Failed], None] = lambda outcome: None
    on_fold: Callable[[Event], None] = lambda event: None
    on_route: Callable[[Event], None] = lambda event: None
    asks: bool = False
    message: str = "seen"
    outcome: str = "an outcome"
    performed: list[str] = field(default_factory=list)


def consumer(script: Script, *, name: str = "bench") -> AnyConsumer:
    """A consumer that counts a run's RunWarned events in its checkpoint stream. With `asks` it requests
    an effect first."""

    def handle(state: int, message: RunWarned | Fetched | Failed, meta: Meta) -> Decision:
        if isinstance(message, Fetched | Failed):
            script.on_outcome(message)
            run = message.effect.run_id
            text = message.message if isinstance(message, Failed) else script.outcome
            done = CheckpointFailed(run=run, step=90 + state, message=text)
            return Decision(events=(done,))
        script.on_event(message)
        if script.asks:
            return Decision(effects=(effect(message.run, message.step),))
        seen = CheckpointFailed(run=message.run, step=message.step, message=script.message)
        return Decision(events=(seen,))

    def evolve(state: int, event: Event) -> int:
        script.on_fold(event)
        return state + 1

    def routes(message: RunWarned) -> tuple[StreamName, ...]:
        script.on_route(message)
        return (checkpoint_stream(message.run),)

    async def perform(asked: FetchCommit, ports: object) -> Fetched:
        script.performed.append(asked.run_id)
        return Fetched(asked)

    return Consumer(
        name=ConsumerName(name),
        category="checkpoint",
        reads=(RunWarned,),
        emits=(CheckpointFailed,),
        effects=(FetchCommit,),
        initial=0,
        evolve=evolve,
        handle=handle,
        routes=routes,
        perform=perform,
    )


def effect(run: str, step: int) -> FetchCommit:
    return FetchCommit(
        workspace=f"{run}/{step}",
        request=UUID(int=7),
        commit=CommitSpec(url="/nowhere"),
        entrypoints=(),
        requester=f"run-{run}",
    )


class Flaky:
    """A port whose calls raise DatabaseUnavailable. `before` and `after` say how many of the next calls
    of a method fail before or after the method has done its work."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.before: dict[str, int] = {}
        self.after: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **more: Any) -> Any:
            if self.before.get(name, 0) > 0:
                self.before[name] -= 1
                raise DatabaseUnavailable("gone before")
            result = await method(*args, **more)
            if self.after.get(name, 0) > 0:
                self.after[name] -= 1
                raise DatabaseUnavailable("gone after")
            return result

        return call


@dataclass
class Bench:
    """A `World`, and the consumers that work in it."""

    home: Path
    consumers: Sequence[AnyConsumer]
    world: World = field(default_factory=World)
    capacity: int = 1024
    worker: WorkerId = WORKER
    run_capacity: Mapping[Lane, int] = field(default_factory=dict)
    spare: Mapping[Lane, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log = Flaky(MemoryLog(self.world))
        self.effects = Flaky(MemoryEffects(self.world))

    async def warn(self, run: str, *steps: int) -> list[Recorded]:
        """Append RunWarned events, as if another consumer had decided them."""
        return [
            recorded
            for step in steps
            for recorded in await MemoryLog(self.world).append(
                [RunWarned(run=run, step=step, message="look")], cause=uuid4()
            )
        ]

    def spoil(self, recorded: Recorded, data: str) -> None:
        """Replace the data of a recorded event."""
        at = self.world.events.index(recorded)
        payload = cast("Encoded", recorded.payload)
        self.world.events[at] = replace(recorded, payload=replace(payload, data=data))

    async def write(self, *events: Event) -> None:
        """Append events as they are, without a cause."""
        for event in events:
            version = self.world.version(event.stream)
            await MemoryLog(self.world).commit(commit_of(event, version + 1))

    def runtime(self) -> Runtime:
        """A runtime over this world, under a long lease."""
        self.world.workers[self.worker] = self.world.now.replace(year=2100)
        blobs = MemoryBlobs()
        artifacts = ArtifactStore(MemoryLog(self.world), blobs)
        ports = AllPorts(
            log=MemoryLog(self.world),
            blobs=blobs,
            artifacts=artifacts,
            datasets=DatasetCache(artifacts),
            clock=SystemClock(),
            settings=Settings.load({"HEADRACE_HOME": str(self.home)}),
        )
        return Runtime(
            Hosting(
                self.worker,
                tuple(self.consumers),
                (Lane.CONTROL,),
                {Lane.CONTROL: self.capacity},
                self.run_capacity,
                self.spare,
            ),
            log=cast("Any", self.log),
            effects=cast("Any", self.effects),
            bus=MemoryBus(self.world),
            ports=ports.build,
            artifacts=artifacts,
            clock=ports.clock,
            wakeup=Wakeup(),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Runtime]:
        """Run a runtime inside the block."""
        runtime = self.runtime()
        task = asyncio.ensure_future(runtime.run())
        try:
            yield runtime
        finally:
            runtime.stop()
            await task

    async def until(self, what: Callable[[], bool], *, within_s: float = 60.0) -> None:
        """Wait; a runtime that ended badly says so here."""
        async with asyncio.timeout(within_s):
            while not what():
                await asyncio.sleep(0.01)

    def seen(self, run: str) -> list[int]:
        """The steps that were counted for a run, in order."""
        return [e.step for e in self.told() if isinstance(e, CheckpointFailed) and e.run == run]

    def letters(self) -> list[MessageDeadLettered]:
        return [event for event in self.told() if isinstance(event, MessageDeadLettered)]

    def told(self) -> list[Event]:
        """All events that can be decoded."""
        return [r.event for r in self.world.events if _decodes(r)]

    def gates(self, *runs: str) -> Mapping[str, str]:
        return {run: self.world.gate(run) for run in runs}


def _decodes(recorded: Recorded) -> bool:
    try:
        return bool(recorded.event)
    except Exception:
        return False
