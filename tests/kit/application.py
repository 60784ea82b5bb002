"""The HTTP application over a real database, in this process, together with a projector."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from starlette.applications import Starlette

from consumers.project.consumer import Projector
from infra.blobs.artifacts import ArtifactStore
from infra.blobs.installed import install
from infra.blobs.local import LocalBlobs
from infra.identity.secrets.sealed import Sealer
from infra.operations.maintenance.archive import Archives
from infra.ports.services import Blobs, RefList
from infra.readmodel.store import ReadModel
from infra.repositories.forge_connections import ForgeConnections
from infra.repositories.forges.api import ForgeApis
from infra.repositories.git.credentials import GitCredential
from infra.settings.settings import Settings
from infra.spine.ports.clock import SystemClock
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database, connect
from producers.core.datasets import registration
from producers.core.datasets.rules import check_file
from producers.dashboard import routes as dashboard
from producers.dialects.osmosis.room import osmosis
from producers.http.app import create_app
from producers.http.services import Services
from schemas.errors import InvalidConfig
from schemas.events import Event

API_KEY = "an-api-key-for-tests"


class KnownRepositories:
    """Repositories that are known by their URLs. The API uses only `check`."""

    def __init__(self, *urls: str) -> None:
        self._urls = urls
        self.credentials: list[GitCredential | None] = []

    async def check(self, url: str, credential: GitCredential | None = None) -> str:
        self.credentials.append(credential)
        if url not in self._urls:
            raise InvalidConfig(f"{url} is not a git repository")
        return "main"

    async def fetch(self, workspace: str, commit: object) -> str:
        raise NotImplementedError

    async def snapshot(self, workspace: str, sha: str) -> bytes:
        raise NotImplementedError

    async def list_refs(self, workspace: str, url: str, *, background: bool = False) -> RefList:
        raise NotImplementedError

    async def read_file(self, workspace: str, sha: str, path: str, *, most: int) -> bytes | None:
        raise NotImplementedError

    async def message(self, workspace: str, sha: str) -> str:
        raise NotImplementedError

    async def changed_paths(self, push: object) -> tuple[str, ...] | None:
        raise NotImplementedError


@dataclass
class Application:
    """An HTTP client of the application, and the application's parts."""

    api: httpx.AsyncClient
    app: Starlette
    services: Services
    projector: Projector
    database: Database

    async def append(self, events: Iterable[Event]) -> None:
        """Append events as the owners of their streams would, and wait until the read model has them."""
        recorded = await self.services.log.append(list(events), cause=uuid4())
        assert await self.services.readmodel.caught_up(recorded[-1].cursor, timeout_s=60)

    async def recorded(self, run: str, *types: type[Event]) -> list[Event]:
        """The events of a run, in their order, or those of some types. Its streams are loaded, because a
        read of the run ends at the horizon, which transactions of other tests hold back."""
        rows = await self.database.durable.fetch(
            "select distinct stream from events where run_id = $1", run
        )
        loaded = await self.services.log.load({row["stream"]: 0 for row in rows})
        found = sorted(
            (one for stream in loaded.values() for one in stream), key=lambda one: one.cursor
        )
        return [one.event for one in found if not types or isinstance(one.event, types)]

    async def get(self, path: str, **parameters: Any) -> Any:
        answer = await self.api.get(f"/api/v1{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.api.post(f"/api/v1{path}", json=body, headers=named)

    async def upload(
        self, name: str, content: str | bytes, file: str = "r.jsonl"
    ) -> httpx.Response:
        """Register and upload a dataset. Returns the response to the upload, or to the registration if
        that was refused."""
        made = await self.post("/datasets", {"name": name, "file_name": file})
        if made.status_code != 201:
            return made
        data = content.encode() if isinstance(content, str) else content
        return await self.api.put(made.json()["upload"]["path"], content=data)


def rows(count: int) -> str:
    """A valid dataset in JSON Lines with `count` rows."""
    return "".join(
        json.dumps({"user_prompt": f"Say {n}", "ground_truth": str(n)}) + "\n" for n in range(count)
    )


async def check_here(
    path: Path,
    kind: str,
    *,
    mapping: Mapping[str, str] | None = None,
    out: Path | None = None,
) -> registration.Checked:
    """Check a file as `registration.check` does, but in this process."""
    out = out or path.with_suffix(".rows")
    with out.open("wb") as file:
        return registration.Checked(check_file(path, kind, file.write, mapping=mapping), out)


@asynccontextmanager
async def _checks(*, confined: bool) -> AsyncIterator[None]:
    """Let files be checked in this process unless they are `confined`. A process for each file takes
    0.3 s of CPU to start, and hundreds of tests upload one."""
    with pytest.MonkeyPatch.context() as patch:
        if not confined:
            patch.setattr(registration, "check", check_here)
        yield


@asynccontextmanager
async def application(
    url: str,
    home: Path,
    *,
    repositories: tuple[str, ...] = ("/repo",),
    confines_checks: bool = False,
    environ: Mapping[str, str] = {},
    store: Blobs | None = None,
) -> AsyncIterator[Application]:
    """The application over the database at `url`, with the further settings of `environ`. With
    `confines_checks`, files are checked in a process of their own, as users have it. Blobs are below
    `home`, or in `store`."""
    settings = Settings.load(
        {
            "HEADRACE_HOME": str(home),
            "HEADRACE_API_KEY": API_KEY,
            "HEADRACE_DATABASE_URL": url,
            **environ,
        }
    )
    async with (
        _checks(confined=confines_checks),
        connect(url) as database,
        Notifier(database) as notifier,
    ):
        log = PostgresLog(database, notifier)
        store = store or LocalBlobs(home / "blobs")
        blobs = await install(store, database, direct=getattr(store, "direct", None))
        readmodel = ReadModel(database)
        known = KnownRepositories(*repositories)
        connections = ForgeConnections(database, Sealer.of(settings))
        forges = ForgeApis(
            connections.get_connection,
            public_url=settings.public_url,
            allowed=settings.git.addresses,
        )
        services = Services(
            log=log,
            effects=PostgresEffects(database),
            database=database,
            blobs=blobs,
            archives=Archives(database, blobs, notifier, scratch=home / "archives"),
            artifacts=ArtifactStore(log, blobs),
            readmodel=readmodel,
            repositories=known,
            check_repository=known.check,
            forges=forges,
            settings=settings,
            clock=SystemClock(),
            slow_poll_s=0.01,
        )
        projector = Projector(log, readmodel, wakeups=notifier)
        task = asyncio.ensure_future(projector.run())
        app = create_app(services, pages=dashboard.ROUTES, dialects=(osmosis(settings),))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {API_KEY}"}
        base = "http://127.0.0.1:8420"
        async with httpx.AsyncClient(transport=transport, base_url=base, headers=headers) as api:
            yield Application(api, app, services, projector, database)
        await services.dataset_uploads.close()
        await forges.aclose()
        if services.oidc is not None:
            await services.oidc.aclose()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
