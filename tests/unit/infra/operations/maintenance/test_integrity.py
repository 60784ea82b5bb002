"""The deep inspection finds and names each kind of damage, and finds nothing in an undamaged
installation."""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import pytest

from consumers.checkpoint import manifest_json
from infra.adapters import Backend, open_backend
from infra.blobs.artifacts import reference
from infra.blobs.local import LocalBlobs
from infra.operations.maintenance.integrity import Damage, Inspection, Kind, inspect
from infra.settings.settings import Settings
from infra.spine.ports.artifacts import SmallArtifact
from schemas.artifact_refs import ArtifactRef
from schemas.events import CheckpointSaved, PolicyUpdated, StepSettled
from tests.kit.postgres import execute
from tests.kit.specs import checkpoint_spec, version

pytestmark = pytest.mark.postgres

RUN = "r"
SMALL = b"a small one"


class Written:
    """A short undamaged history: two versions, two checkpoints, a small artifact."""

    def __init__(self, backend: Backend, home: Path, settings: Settings) -> None:
        self.backend = backend
        self.url = backend.database.url
        self.home = home
        self.settings = settings
        self.weights: list[ArtifactRef] = []
        self.manifests: list[ArtifactRef] = []

    async def write(self) -> None:
        for step in (1, 2):
            await self.step(step)
        await self.checkpoint(1)
        await self.checkpoint(2)

    async def step(self, step: int) -> None:
        put = self.backend.artifacts.put_artifact
        weights = await put(b"weights %d" % step, run=RUN, blob=True)
        self.weights.append(weights)
        state = version(step).model_copy(update={"weights": weights, "state": None})
        updated = PolicyUpdated(
            run=RUN,
            step=step,
            state=state,
            batch=uuid4(),
            metrics={},
            plan=(1,),
            versions={},
            pinned=True,
        )
        await self.backend.log.append([updated], cause=uuid4())
        await self.backend.log.append(
            [StepSettled(run=RUN, step=step, state=state, metrics={})], cause=uuid4()
        )

    async def checkpoint(
        self, step: int, *, parent: str | None = "the last", says: int = 0
    ) -> None:
        """Write a checkpoint; `says` is another step that its manifest claims to belong to."""
        last = self.manifests[-1].sha256 if self.manifests else None
        spec = checkpoint_spec(step).model_copy(
            update={
                "run": RUN,
                "state": version(step).model_copy(
                    update={"weights": self.weights[step - 1], "state": None}
                ),
                "parent": last if parent == "the last" else parent,
                "files": {},
            }
        )
        data = manifest_json(spec.model_copy(update={"step": says or step}))
        key = f"runs/{RUN}/ckpt/{len(self.manifests)}/MANIFEST.json"
        uri = await self.backend.blobs.put_blob(key, data)
        manifest = reference(data, uri=uri)
        self.manifests.append(manifest)
        saved = CheckpointSaved(spec=spec, manifest=manifest, reward=None)
        await self.backend.log.append([saved], cause=uuid4())

    async def rewrite(self, sql: str) -> None:
        """Rewrite an event, which the database allows to nobody."""
        await execute(
            self.url,
            f"alter table events disable trigger events_are_facts; {sql};"
            " alter table events enable trigger events_are_facts",
        )

    async def inspected(self) -> Inspection:
        return await inspect(self.url, LocalBlobs(self.home / "blobs"), self.settings)


@pytest.fixture
async def written(database_url: str, tmp_path: Path) -> AsyncIterator[Written]:
    home = tmp_path / "home"
    settings = Settings.load({"HEADRACE_HOME": str(home), "HEADRACE_DATABASE_URL": database_url})
    async with open_backend(settings) as backend:
        made = Written(backend, home, settings)
        await made.write()
        yield made


async def test_a_sound_installation_has_no_damage(written: Written) -> None:
    found = await written.inspected()
    assert found.damages == []
    assert (found.events, found.blobs, found.manifests) == (6, 4, 2)


async def lost_event(written: Written) -> None:
    await written.rewrite("delete from events where stream = 'policy-r' and version = 1")


async def doubled_event(written: Written) -> None:
    await written.rewrite(
        "insert into events (id, stream, version, type, schema_version, data, run_id, correlation)"
        " select id, stream, version, type, schema_version, data, run_id, correlation from events"
        " where stream = 'policy-r' and version = 2"
    )


async def old_head(written: Written) -> None:
    await execute(written.url, "update streams set version = 1 where stream = 'policy-r'")


async def unreadable(written: Written) -> None:
    await written.rewrite("update events set data = '{}' where stream = 'policy-r' and version = 2")


async def lost_blob(written: Written) -> None:
    await written.backend.blobs.delete(written.weights[0].uri)


async def damaged_blob(written: Written) -> None:
    key = f"runs/{RUN}/objects/{written.weights[0].sha256}"
    await written.backend.blobs.put_blob(key, b"weights 9")


async def lost_manifest(written: Written) -> None:
    await written.backend.blobs.delete(written.manifests[1].uri)


async def damaged_manifest(written: Written) -> None:
    await written.backend.blobs.put_blob(f"runs/{RUN}/ckpt/1/MANIFEST.json", b"{}")


async def foreign(written: Written) -> None:
    data = b"{}"
    saved = CheckpointSaved(
        spec=checkpoint_spec(1).model_copy(update={"run": "s", "files": {}, "parent": None}),
        manifest=reference(data, uri="file:///elsewhere/MANIFEST.json"),
        reward=None,
    )
    await written.backend.log.append([saved], cause=uuid4())


async def lying_manifest(written: Written) -> None:
    await written.checkpoint(2, says=3)


async def wrong_parent(written: Written) -> None:
    await written.checkpoint(2, parent=hashlib.sha256(b"another").hexdigest())


@pytest.mark.parametrize(
    ("harm", "kind", "what"),
    [
        (lost_event, Kind.MISSING_EVENT, "policy-r/1"),
        (doubled_event, Kind.DOUBLED_EVENT, "policy-r/2"),
        (old_head, Kind.WRONG_HEAD, "policy-r"),
        (unreadable, Kind.UNREADABLE_EVENT, "policy-r/2"),
        (lost_blob, Kind.MISSING_BLOB, "/objects/"),
        (damaged_blob, Kind.DAMAGED_BLOB, "/objects/"),
        (lost_manifest, Kind.MISSING_BLOB, "MANIFEST.json"),
        (damaged_manifest, Kind.DAMAGED_BLOB, "MANIFEST.json"),
        (foreign, Kind.FOREIGN_NAME, "file:///elsewhere"),
        (lying_manifest, Kind.WRONG_MANIFEST, "MANIFEST.json"),
        (wrong_parent, Kind.WRONG_PARENT, "MANIFEST.json"),
    ],
)
async def test_each_damage_is_named(
    written: Written, harm: Callable[[Written], Awaitable[None]], kind: Kind, what: str
) -> None:
    await harm(written)
    named = [damage for damage in (await written.inspected()).damages if damage.kind == kind]
    assert len(named) == 1, named
    assert what in named[0].what


async def test_rows_are_looked_into(written: Written) -> None:
    """Small artifacts are stored in the database itself, so their rows are inspected."""
    row = SmallArtifact(hashlib.sha256(SMALL).hexdigest(), SMALL)
    other = hashlib.sha256(b"other").hexdigest()
    for n, sha256 in enumerate((row.sha256, other)):
        ref = ArtifactRef(uri=f"row:{sha256}", sha256=sha256, size=len(SMALL))
        state = version(3 + n).model_copy(update={"weights": ref, "state": None})
        updated = PolicyUpdated(
            run=RUN,
            step=3 + n,
            state=state,
            batch=uuid4(),
            metrics={},
            plan=(1,),
            versions={},
            pinned=True,
        )
        await written.backend.log.append([updated], cause=uuid4())
    insert = "insert into artifacts (sha256, data) values ($1, $2)"
    await written.backend.database.durable.execute(insert, row.sha256, row.data)
    found = await written.inspected()
    assert found.damages == [
        Damage(Kind.MISSING_ROW, f"row:{other}", "it is gone; policy-r/4 names it")
    ]
    await execute(written.url, "update artifacts set data = 'a damaged 1'")
    damages = (await written.inspected()).damages
    assert {damage.kind for damage in damages} == {Kind.MISSING_ROW, Kind.DAMAGED_ROW}
