"""A worker that hosts one stateless consumer: it decides the same whatever its state says.

So nothing but the inbox keeps it from counting a message twice, and nothing but the claim's epoch from
taking an outcome twice: the deciders of Headrace would hide a hole here by knowing what they did.
Started as `python -m tests.crash.stateless_consumer URL HOME GO`. An effect is done once the file GO
exists. With STATELESS_EFFECTS_ONLY=1 it appends nothing, so that no stream's version says what was
decided: it asks for effects, and each leaves a line in HOME/performed.
"""

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from infra import failpoints
from infra.settings.settings import Settings
from infra.spine.postgres.lease import LeaseKeeper
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import connect
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.hosting import Hosting
from schemas.effects import FetchCommit, Lane, Outcome
from schemas.events import CheckpointFailed, Event, RunWarned
from schemas.ids import ConsumerName, StreamName, WorkerId, checkpoint_stream
from schemas.specs import CommitSpec
from tests.kit.runtimes import runtime_on

REQUEST = UUID(int=7)
EFFECTS_ONLY = os.environ.get("STATELESS_EFFECTS_ONLY") == "1"


@dataclass(frozen=True, slots=True)
class Done(Outcome):
    effect: FetchCommit


@dataclass(frozen=True, slots=True)
class Nothing:
    """It remembers nothing."""


def evolve(state: Nothing, event: Event) -> Nothing:
    return state


def handle(state: Nothing, message: RunWarned | Done, meta: Meta) -> Decision:
    if isinstance(message, Done):
        if EFFECTS_ONLY:
            return NOTHING
        run = message.effect.run_id
        return Decision(events=(CheckpointFailed(run=run, step=2, message="an outcome"),))
    counted = CheckpointFailed(run=message.run, step=1, message="a message")
    asked = FetchCommit(
        workspace=message.run,
        request=REQUEST,
        commit=CommitSpec(url="/nowhere"),
        entrypoints=(),
        requester=f"run-{message.run}",
    )
    return Decision(events=() if EFFECTS_ONLY else (counted,), effects=(asked,))


def routes(message: RunWarned | Done) -> tuple[StreamName, ...]:
    return (checkpoint_stream(message.run),) if isinstance(message, RunWarned) else ()


async def perform(effect: FetchCommit, ports: object) -> Done:
    go = Path(sys.argv[3])
    while not await asyncio.to_thread(go.exists):
        await asyncio.sleep(0.02)
    if EFFECTS_ONLY:
        with (Path(sys.argv[2]) / "performed").open("a") as lines:
            lines.write(f"{effect.run_id}\n")
    return Done(effect)


CONSUMER: Consumer[Nothing, CheckpointFailed, RunWarned | Done, FetchCommit, object] = Consumer(
    name=ConsumerName("stateless"),
    category="checkpoint",
    reads=(RunWarned,),
    emits=(CheckpointFailed,),
    effects=(FetchCommit,),
    initial=Nothing(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    perform=perform,
)


async def main(url: str, home: Path) -> None:
    settings = Settings.load({**os.environ, "HEADRACE_HOME": str(home)})
    failpoints.arm(settings.failpoint or "", home)
    hosting = Hosting(WorkerId(f"stateless-{os.getpid()}"), (CONSUMER,), (Lane.CONTROL,))
    async with connect(url, size=2) as database, Notifier(database) as notifier:
        runtime = runtime_on(database, notifier, hosting, home=home, settings=settings)
        keeper = LeaseKeeper(url, hosting.worker, on_beat=lambda: None, on_lost=lambda: None)
        await keeper.start()
        await runtime.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
