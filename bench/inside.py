"""The platform inside this process, for benchmarks: an embedded Postgres, a worker with all consumers,
no HTTP. What it costs is measured where it is spent."""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from consumers.__main__ import REGISTRY, lanes_of, load
from consumers.worker import hosted, leased
from infra import embedded
from infra.backend import Backend, open_backend
from infra.hosting import Hosting
from infra.migrate import migrate
from infra.notify import Wakeup
from infra.ports import Cursor, Recorded
from infra.runtime import Runtime
from infra.settings import Settings
from schemas.config import RunConfig
from schemas.datasets import Row
from schemas.events import RepositoryPushed, RunRequested
from schemas.ids import WorkerId, run_stream
from schemas.sampling import Message, ModelRef
from schemas.specs import CommitSpec, DatasetRef, Entrypoint
from tests.kit.platform import make_workspace


@dataclass
class Inside:
    """A running worker and its adapters."""

    backend: Backend
    runtime: Runtime
    workspace: Path
    wakeup: Wakeup

    async def dataset(self, prompts: Sequence[str]) -> DatasetRef:
        """Register rows without a label."""
        rows = [Row(prompt=(Message(role="user", content=text),), label=text) for text in prompts]
        content = await self.backend.artifacts.put(
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
                RepositoryPushed(
                    workspace="w",
                    workspace_name="w",
                    commit=CommitSpec(url=str(self.workspace)),
                    entrypoints=(Entrypoint(rollout=rollout),),
                    requester=run_stream(run),
                ),
            ],
            cause=uuid4(),
        )
        while True:
            events = list(await self.backend.log.read(run, after=Cursor(), limit=1_000_000))
            if events and events[-1].event.gate == "closed":
                return events
            await self.wakeup.wait(0.5)


@asynccontextmanager
async def inside(files: Mapping[str, str]) -> AsyncIterator[Inside]:
    """The platform, with a workspace of these files."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        server = await asyncio.to_thread(embedded.start, root / "home")
        await migrate(server.url)
        environ = {
            **os.environ,
            "HEADRACE_HOME": str(root / "home"),
            "HEADRACE_DATABASE_URL": server.url,
        }
        settings = Settings.load(environ)
        consumers = tuple(load(name) for name in REGISTRY)
        hosting = Hosting(worker=WorkerId("bench"), consumers=consumers, lanes=lanes_of(consumers))
        workspace = make_workspace(root / "workspace", files)
        async with (
            open_backend(settings) as backend,
            hosted(hosting, backend, settings) as runtime,
            leased(hosting, backend, runtime),
        ):
            working = asyncio.ensure_future(runtime.run())
            yield Inside(backend, runtime, workspace, backend.notifier.subscribe())
            runtime.stop()
            await working
        server.stop()
