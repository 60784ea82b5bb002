"""The platform inside this process, for benchmarks: a worker with all consumers and no HTTP, on an
embedded Postgres or on the real components. Each benchmark measures the cost at the place where it
arises.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from consumers.process.worker import hold_lease, open_runtime
from consumers.registry import REGISTRY, lanes_of, load
from infra.adapters import Backend, open_backend
from infra.operations.local import data_directory, embedded_postgres
from infra.settings.settings import Settings
from infra.spine.ports.event_log import Cursor, Recorded
from infra.spine.postgres.migrate import migrate
from infra.spine.runtime.hosting import Hosting
from infra.spine.runtime.runtime import Runtime
from schemas.config import RunConfig
from schemas.datasets import DatasetRow
from schemas.events import CommitRequested, RunRequested
from schemas.ids import WorkerId, run_stream
from schemas.sampling import Message, ModelRef
from schemas.specs import CommitSpec, DatasetRef, Entrypoint
from tests.kit.platform import make_workspace
from tests.stack.components import components

ASK_S = 0.5
"""How often it is asked whether a run has ended: that is not part of the measurement."""


@dataclass
class Inside:
    """A running worker and its adapters."""

    backend: Backend
    runtime: Runtime
    workspace: Path

    async def dataset(self, prompts: Sequence[str]) -> DatasetRef:
        """Register rows without a label."""
        rows = [
            DatasetRow(prompt=(Message(role="user", content=text),), label=text) for text in prompts
        ]
        content = await self.backend.artifacts.put_artifact(
            b"".join(row.to_line() for row in rows), run="datasets"
        )
        return DatasetRef(dataset="bench", name="bench", content=content, num_rows=len(rows))

    async def run(
        self, config: Mapping[str, object], model: ModelRef, dataset: DatasetRef
    ) -> list[Recorded]:
        """Run to its end; returns its events in log order."""
        run = uuid4().hex[:16]
        parsed = RunConfig.model_validate_json(json.dumps(config))
        rollout = parsed.experiment.rollout or "say"
        await self.backend.log.append(
            [
                RunRequested(
                    run=run,
                    run_name=run,
                    config=parsed,
                    model=model,
                    dataset=dataset,
                    workspace="w",
                ),
                CommitRequested(
                    workspace="w",
                    workspace_name="w",
                    commit=CommitSpec(url=str(self.workspace)),
                    entrypoints=(Entrypoint(rollout=rollout),),
                    requester=run_stream(run),
                ),
            ],
            cause=uuid4(),
        )
        while (await self.backend.effects.gates([run])).get(run) != "closed":
            await asyncio.sleep(ASK_S)
        return list(await self.backend.log.read(run, after=Cursor(), limit=1_000_000))


@asynccontextmanager
async def inside(files: Mapping[str, str], *, stack: bool = False) -> AsyncIterator[Inside]:
    """The platform, with a workspace of these files. `stack`: on PostgreSQL, Kafka (with its relay in
    this process too) and an S3 store."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as opened:
        root = Path(directory)
        found = await asyncio.to_thread(
            opened.enter_context, _stack(root) if stack else _embedded(root)
        )
        os.environ.update({"HEADRACE_HOME": str(root / "home"), **found})
        settings = Settings.load(os.environ)
        assert settings.database_url is not None
        await migrate(settings.database_url)
        consumers = tuple(load(name) for name in REGISTRY)
        hosting = Hosting(worker=WorkerId("bench"), consumers=consumers, lanes=lanes_of(consumers))
        workspace = make_workspace(root / "workspace", files)
        async with (
            open_backend(settings) as backend,
            open_runtime(hosting, backend, settings) as runtime,
            hold_lease(hosting, backend, runtime),
        ):
            tasks = [asyncio.ensure_future(runtime.run())]
            if settings.kafka is not None:
                relay = backend.relay(settings.kafka, tuple(REGISTRY))
                tasks.append(asyncio.ensure_future(relay.run()))
            yield Inside(backend, runtime, workspace)
            runtime.stop()
            await tasks.pop(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _embedded(root: Path) -> Iterator[Mapping[str, str]]:
    server = embedded_postgres.start(root / "home")
    try:
        yield {"HEADRACE_DATABASE_URL": server.url}
    finally:
        server.stop()
        embedded_postgres.remove(root / "home")


@contextmanager
def _stack(root: Path) -> Iterator[Mapping[str, str]]:
    try:
        with components(root) as found:
            yield found.environment
    finally:
        data_directory.remove(root / "postgres")
