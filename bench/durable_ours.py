"""Headrace's side of B3. An edge appends an event. A worker's consumer takes it from the bus, decides an
event and an effect, performs the effect, and its outcome is an event. Inbox, log, effects, claims and
leases are those of production.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import UUID, uuid4

from bench.durable_theirs import POOL, Ask
from infra.operations.local import gc_freeze
from infra.spine.ports.event_log import Commit, Recorded
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.lease import LeaseKeeper
from infra.spine.postgres.migrate import migrate
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import connect
from infra.spine.runtime.consumer import Consumer, Decision, Meta
from infra.spine.runtime.hosting import Hosting
from schemas.effects import FetchCommit, Lane, Outcome
from schemas.events import CheckpointFailed, Event, RunWarned
from schemas.ids import ConsumerName, StreamName, WorkerId, checkpoint_stream
from schemas.specs import CommitSpec
from tests.kit.runtimes import runtime_on

DECIDED, PERFORMED = 1, 2


@dataclass(frozen=True, slots=True)
class Done(Outcome):
    effect: FetchCommit


def handle(state: int, message: RunWarned | Done, meta: Meta) -> Decision:
    if isinstance(message, Done):
        return Decision(events=(_fact(message.effect.run_id, PERFORMED),))
    effect = FetchCommit(
        workspace=message.run,
        request=UUID(int=7),
        commit=CommitSpec(url="/nowhere"),
        entrypoints=(),
        requester=f"run-{message.run}",
    )
    return Decision(events=(_fact(message.run, DECIDED),), effects=(effect,))


def _fact(run: str, kind: int) -> CheckpointFailed:
    return CheckpointFailed(run=run, step=kind, message="a fact")


def evolve(state: int, event: Event) -> int:
    return state + 1


def routes(message: RunWarned) -> tuple[StreamName, ...]:
    return (checkpoint_stream(message.run),)


async def perform(effect: FetchCommit, ports: object) -> Done:
    return Done(effect)


CONSUMER = Consumer(
    name=ConsumerName("bench"),
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


class Watched(PostgresLog):
    """Notes when each message's last fact was durable."""

    done: dict[str, float]

    async def commit(self, commit: Commit) -> Sequence[Recorded]:
        recorded = await super().commit(commit)
        now = time.monotonic()
        for new in commit.events:
            if isinstance(new.event, CheckpointFailed) and new.event.step == PERFORMED:
                self.done[new.event.run] = now
        return recorded


class Headrace:
    name = "Headrace"
    done_sql = (
        "select count(*) from events where type = 'rl.checkpoint.failed' and data ->> 'step' = '2'"
    )

    async def prepare(self, url: str) -> None:
        await migrate(url)

    @asynccontextmanager
    async def client(self, url: str) -> AsyncIterator[Ask]:
        async with connect(url, size=POOL) as database, Notifier(database) as notifier:
            log = PostgresLog(database, notifier)
            yield lambda message: log.append(
                [RunWarned(run=message, step=1, message="look")], cause=uuid4()
            )

    async def work(self, url: str, done: dict[str, float], ready: Callable[[], None]) -> None:
        hosting = Hosting(WorkerId("bench"), (CONSUMER,), (Lane.CONTROL,))
        async with AsyncExitStack() as stack:
            home = Path(stack.enter_context(TemporaryDirectory()))
            database = await stack.enter_async_context(connect(url, size=POOL))
            notifier = await stack.enter_async_context(Notifier(database))
            log = Watched(database, notifier)
            log.done = done
            runtime = runtime_on(database, notifier, hosting, home=home, log=log)
            keeper = LeaseKeeper(url, hosting.worker, on_beat=lambda: None, on_lost=lambda: None)
            await keeper.start()
            gc_freeze.freeze()  # as a worker does
            try:
                ready()
                await runtime.run()
            finally:
                await keeper.stop()
