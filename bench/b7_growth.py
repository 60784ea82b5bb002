"""B7, growth: a run of up to 1,000,000 events, and up to 10,000 runs.

Rebuild: the time until a process that has just started knows the state of the run. `cold` is from all
its events (after an upgrade that changed the fold). `after a crash` is from the snapshot of the dead
process and the events after it. `read model`: all tables projected again (up to 100,000 events). Then
pages of 50 runs and single runs through the HTTP application, p50 and p99. Working tables: the rows in
them while that many events go through a worker (the maximum), and at the end.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain, count, islice
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
import httpx

from bench.working_tables import HEAD, measure_growth
from consumers.project.consumer import Projector
from consumers.run.consumer import CONSUMER
from infra.blobs.artifacts import ArtifactStore
from infra.blobs.installed import install
from infra.blobs.local import LocalBlobs
from infra.identity.secrets.sealed import Sealer
from infra.operations.local import embedded_postgres
from infra.operations.maintenance.archive import Archives
from infra.readmodel.store import ReadModel
from infra.repositories.forge_connections import ForgeConnections
from infra.repositories.forges.api import ForgeApis
from infra.repositories.git.mirrors import GitRepositories
from infra.settings.git import LAPTOP
from infra.settings.settings import Settings
from infra.spine.ports.clock import SystemClock
from infra.spine.postgres.codec import encode
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.migrate import migrate
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database, connect
from infra.spine.runtime.folded_states import SNAPSHOT_EVERY, StateCache
from producers.http.app import create_app
from producers.http.services import Services
from schemas.artifact_refs import ArtifactRef
from schemas.config import RunConfig
from schemas.events import (
    BatchAssembled,
    Event,
    GroupsSettled,
    RunRequested,
    SettledGroup,
    StepSettled,
)
from schemas.ids import Purpose, StreamName, run_stream
from schemas.sampling import ModelRef
from schemas.specs import BatchGroup, DatasetRef, StateRef

SHA = "ab" * 32
REF = ArtifactRef(uri=f"row:{SHA}", sha256=SHA, size=1)
DATASET = DatasetRef(dataset="d", name="d", content=REF, num_rows=8)
GROUPS = 8
RUN = "0" * 16
PROJECTED = 100_000
COLUMNS = ("id", "stream", "version", "type", "schema_version", "data", "run_id", "correlation")


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


async def fill(
    database: Database, stream: StreamName, events: Iterable[Event], *, start: int = 0
) -> int:
    """Append by COPY what would have been appended one decision at a time; returns the version."""
    version = start
    iterator = iter(events)
    while page := list(islice(iterator, 5000)):
        rows = [
            (uuid4(), stream, version + n, e.type, e.version, encode(e), e.run_id, UUID(int=1))
            for n, e in enumerate(page, start=1)
        ]
        version += len(rows)
        async with database.lazy.acquire() as connection, connection.transaction():
            await connection.copy_records_to_table("events", records=rows, columns=COLUMNS)
            await connection.execute(
                "insert into streams values ($1, $2)"
                " on conflict (stream) do update set version = excluded.version",
                stream,
                version,
            )
    return version


async def seconds(work: Awaitable[object]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


def story(first: int, events: int) -> Iterator[Event]:
    """So many events of a run, from a step on."""
    steps = (event for n in count(first) for event in step(RUN, n))
    return islice(steps, events)


@asynccontextmanager
async def database_of(
    server: embedded_postgres.EmbeddedPostgres,
) -> AsyncIterator[tuple[Database, Notifier]]:
    """A database of its own, so that what one part left does not weigh on another."""
    admin = await asyncpg.connect(server.url)
    name = f"b7_{uuid4().hex[:8]}"
    await admin.execute(f"create database {name}")
    url = server.url.replace("/postgres?", f"/{name}?")
    await migrate(url)
    async with connect(url) as database, Notifier(database) as notifier:
        yield database, notifier
    await admin.execute(f"drop database {name} with (force)")
    await admin.close()


async def rebuilt(server: embedded_postgres.EmbeddedPostgres, events: int) -> None:
    """One line: a run of so many events."""
    async with database_of(server) as (database, notifier):
        log = PostgresLog(database, notifier)
        stream = run_stream(RUN)
        head = await fill(database, stream, chain([request(RUN)], story(1, events - 1)))
        await database.lazy.execute("analyze events")
        wanted = {stream: CONSUMER}
        cold = await seconds(StateCache(log).load(wanted))
        await fill(database, stream, story(events, SNAPSHOT_EVERY), start=head)
        crashed = await seconds(StateCache(log).load(wanted))
        projected = "-"
        if events <= PROJECTED:
            rebuild = Projector(log, ReadModel(database)).rebuild()
            projected = f"{await seconds(rebuild):.2f} s"
        print(f"{events:>10,}{cold:>12.2f} s{crashed:>14.3f} s{projected:>14}", flush=True)


async def pages(server: embedded_postgres.EmbeddedPostgres, runs: int, home: Path) -> None:
    """One line: so many runs."""
    async with database_of(server) as (database, notifier):
        log, readmodel = PostgresLog(database, notifier), ReadModel(database)
        for number in range(runs):
            run = f"{number:016x}"
            await fill(database, run_stream(run), [request(run)])
        projector = Projector(log, readmodel)
        while await projector.step():
            pass
        await database.lazy.execute("analyze")
        times = await asked(log, database, readmodel, home, runs)
        cells = [f"{statistics.median(t) * 1e3:8.1f}{p99(t) * 1e3:9.1f}" for t in times]
        print(f"{runs:>10,}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


def p99(times: Sequence[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


async def main(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        server = await asyncio.to_thread(embedded_postgres.start, home)
        print(f"B7 growth, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
        try:
            print(f"{'events':>10}{'cold':>14}{'after a crash':>16}{'read model':>14}")
            for events in powers(given.events):
                await rebuilt(server, events)
            print(f"{'runs':>10}{'list p50, p99 ms':>22}{'info p50, p99 ms':>22}")
            for runs in powers(given.runs):
                await pages(server, runs, home)
            print(HEAD)
            for events in powers(given.worked):
                async with database_of(server) as (database, _):
                    print(await measure_growth(database, events), flush=True)
        finally:
            server.stop()
        print(f"load at the end {os.getloadavg()[0]:.1f}")


def powers(most: int) -> list[int]:
    """1,000 and its tenfold up to `most`; at least `most`."""
    return [n for n in (10**k for k in range(3, 9)) if n < most] + [most]


async def asked(
    log: PostgresLog, database: Database, readmodel: ReadModel, home: Path, runs: int
) -> tuple[list[float], list[float]]:
    """How long pages of 50 and single runs take, anywhere among all of them."""
    settings = Settings.load({"HEADRACE_HOME": str(home), "HEADRACE_API_KEY": "t"})
    blobs = await install(LocalBlobs(home / "blobs"), database)
    archives = Archives(database, blobs, Notifier(database), scratch=home / "archives")
    repositories = GitRepositories(home / "git", settings=LAPTOP)
    connections = ForgeConnections(database, Sealer.of(settings))
    app = create_app(
        Services(
            log=log,
            effects=PostgresEffects(database),
            database=database,
            blobs=blobs,
            archives=archives,
            artifacts=ArtifactStore(log, blobs),
            readmodel=readmodel,
            repositories=repositories,
            check_repository=repositories.check,
            forges=ForgeApis(connections.get_connection, public_url=settings.public_url),
            settings=settings,
            clock=SystemClock(),
        )
    )
    transport = httpx.ASGITransport(app=app)
    headers = {"Authorization": "Bearer t"}
    draw = random.Random(7)
    lists: list[float] = []
    infos: list[float] = []
    async with httpx.AsyncClient(
        transport=transport, base_url=settings.url, headers=headers
    ) as http:
        for number in [0, runs - 50, *(draw.randrange(runs) for _ in range(298))]:
            parameters = {"limit": 50, "offset": max(0, min(number, runs - 50))}
            lists.append(await seconds(_got(http, "/api/v1/runs", parameters)))
            infos.append(await seconds(_got(http, f"/api/v1/runs/run-{number:016x}", {})))
    return lists, infos


async def _got(http: httpx.AsyncClient, path: str, parameters: dict[str, int]) -> None:
    answer = await http.get(path, params=parameters)
    assert answer.status_code == 200, answer.text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--worked", type=int, default=1_000_000, help="events through a worker")
    asyncio.run(main(parser.parse_args()))
