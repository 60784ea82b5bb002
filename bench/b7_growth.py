"""B7, growth (small): a run of 100,000 events rebuilt, and 1,000 runs listed.

Rebuild: the run's state folded from the log (cold, and from its snapshot), and the read model projected
anew. List: a page of 50 through the HTTP application, p50 and p99.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID, uuid4

import httpx

from consumers.project import Projector
from consumers.run import CONSUMER
from infra import embedded
from infra.artifacts import ArtifactStore
from infra.blobs import LocalBlobs
from infra.clock import SystemClock
from infra.database import connect
from infra.effects import PostgresEffects
from infra.git import GitRepositories
from infra.log import PostgresLog
from infra.migrate import migrate
from infra.notify import Notifier
from infra.ports import Commit, NewEvent
from infra.readmodel import ReadModel
from infra.settings import Settings
from infra.states import States
from producers.api.app import create_app
from producers.api.services import Services
from schemas.config import RunConfig
from schemas.events import (
    BatchAssembled,
    Event,
    GroupsSettled,
    RunRequested,
    SettledGroup,
    StepSettled,
)
from schemas.ids import EventId, Purpose, StreamName, run_stream
from schemas.sampling import ArtifactRef, ModelRef
from schemas.specs import BatchGroup, DatasetRef, StateRef

SHA = "ab" * 32
REF = ArtifactRef(uri=f"row:{SHA}", sha256=SHA, size=1)
DATASET = DatasetRef(dataset="d", name="d", content=REF, num_rows=8)
GROUPS = 8


def request(run: str) -> RunRequested:
    config = RunConfig.model_validate(
        {
            "experiment": {
                "rollout": "say",
                "entrypoint": "main.py",
                "model_path": "scratch:x",
                "dataset": "d",
            }
        }
    )
    model = ModelRef(kind="scratch", name="qwen3-tiny")
    return RunRequested(run=run, run_name=f"run-{run}", config=config, model=model, dataset=DATASET)


def step(run: str, number: int) -> list[Event]:
    """The events of one step in the run's stream."""
    state = StateRef(step=number, weights_sha256=SHA, state_sha256=SHA, weights=REF, state=REF)
    groups = [
        BatchGroup(slot=slot, replacement=0, artifact=REF, rewards=(0.0, 1.0))
        for slot in range(GROUPS)
    ]
    settled = [
        GroupsSettled(
            owner=run, purpose=Purpose.TRAIN, step=number, groups=(SettledGroup(group=group),)
        )
        for group in groups
    ]
    metrics = {"rollout/raw_reward": 0.5, "train/loss": 0.1}
    return [
        *settled,
        BatchAssembled(run=run, step=number, groups=tuple(groups)),
        StepSettled(run=run, step=number, state=state, metrics=metrics),
    ]


async def fill(log: PostgresLog, stream: StreamName, events: Sequence[Event]) -> None:
    """Write many events quickly: 500 a commit."""
    for start in range(0, len(events), 500):
        page = events[start : start + 500]
        new = tuple(
            NewEvent(
                id=EventId(uuid4()),
                stream=stream,
                version=start + n,
                event=event,
                causation=None,
                correlation=UUID(int=1),
            )
            for n, event in enumerate(page, start=1)
        )
        await log.commit(Commit(expected={stream: start}, events=new))


async def seconds(work) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def main(events: int, runs: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        server = await asyncio.to_thread(embedded.start, home)
        await migrate(server.url)
        async with connect(server.url) as database, Notifier(database) as notifier:
            log, readmodel = PostgresLog(database, notifier), ReadModel(database)
            run = "0" * 16
            steps = [e for n in range(1, events // (GROUPS + 2) + 1) for e in step(run, n)]
            story: list[Event] = [request(run), *steps]
            await fill(log, run_stream(run), story)
            print(f"B7 growth, load {os.getloadavg()[0]:.1f}")
            wanted = {run_stream(run): CONSUMER}
            cold = await seconds(States(log).load(wanted))
            print(f"fold {len(story):,} events, cold        {cold:8.2f} s")
            print(
                f"fold again, from its snapshot     {await seconds(States(log).load(wanted)):8.3f} s"
            )
            projector = Projector(log, readmodel)
            print(f"read model rebuilt                {await seconds(projector.rebuild()):8.2f} s")
            for number in range(1, runs + 1):
                await log.append([request(f"{number:016x}")], cause=uuid4())
            while await projector.step():
                pass
            times = await listed(log, database, readmodel, home)
            print(
                f"list 50 of {runs + 1:,} runs               p50 {statistics.median(times) * 1e3:.1f} ms"
                f"  p99 {sorted(times)[int(len(times) * 0.99)] * 1e3:.1f} ms"
            )
        server.stop()


async def listed(log: PostgresLog, database, readmodel: ReadModel, home: Path) -> list[float]:  # type: ignore[no-untyped-def]
    settings = Settings.load({"HEADRACE_HOME": str(home), "HEADRACE_TOKEN": "t"})
    blobs = LocalBlobs(home / "blobs")
    app = create_app(
        Services(
            log=log,
            effects=PostgresEffects(database),
            blobs=blobs,
            artifacts=ArtifactStore(log, blobs),
            readmodel=readmodel,
            repositories=GitRepositories(home / "git"),
            settings=settings,
            clock=SystemClock(),
        )
    )
    transport = httpx.ASGITransport(app=app)
    headers = {"Authorization": "Bearer t"}
    times = []
    async with httpx.AsyncClient(
        transport=transport, base_url=settings.url, headers=headers
    ) as http:
        for number in range(200):
            start = time.perf_counter()
            answer = await http.get("/api/v1/runs", params={"limit": 50, "offset": number % 900})
            times.append(time.perf_counter() - start)
            assert answer.status_code == 200, answer.text
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=1_000)
    given = parser.parse_args()
    asyncio.run(main(given.events, given.runs))
