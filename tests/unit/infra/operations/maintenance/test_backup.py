"""A backup holds database and blobs of one moment; a restore brings back exactly that in another
place, or nothing."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from infra.adapters import Backend, open_backend
from infra.blobs.artifacts import reference
from infra.blobs.local import LocalBlobs
from infra.operations.maintenance.backup import CONTENTS, back_up
from infra.operations.maintenance.restore import restore
from infra.settings.settings import Settings
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.migrate import migrate
from schemas.artifact_refs import ArtifactRef
from schemas.errors import Conflict, CorruptData, InvalidConfig, NotFound
from schemas.events import Event, PolicyUpdated, StepSettled
from tests.kit.postgres import bare_database
from tests.kit.specs import version
from tests.kit.story import beginning, checkpoint, step

pytestmark = pytest.mark.postgres


def settings(url: str, home: Path) -> Settings:
    return Settings.load({"HEADRACE_HOME": str(home), "HEADRACE_DATABASE_URL": url})


def store(home: Path) -> LocalBlobs:
    return LocalBlobs(home / "blobs")


@pytest.fixture
def bare_url(postgres_url: str) -> Iterator[str]:
    with bare_database(postgres_url) as url:
        yield url


@pytest.fixture
async def backend(database_url: str, tmp_path: Path) -> AsyncIterator[Backend]:
    async with open_backend(settings(database_url, tmp_path / "old")) as opened:
        yield opened


async def updated(backend: Backend, number: int, *, pinned: bool) -> tuple[Event, ArtifactRef]:
    """A step whose version has its weights as a blob, together with those weights."""
    weights = await backend.artifacts.put_artifact(
        f"weights {number}".encode() * 99, run="r", blob=True
    )
    (event,) = (e for e in step("r", number) if e.type == "rl.policy.updated")
    state = version(number).model_copy(update={"weights": weights, "state": None})
    return event.model_copy(update={"state": state, "pinned": pinned}), weights


async def written(backend: Backend, *events: Event) -> None:
    for event in events:
        await backend.log.append([event], cause=uuid4())


async def copied(url: str, home: Path, target: Path) -> tuple[str, ...]:
    """Back up and return the faults that were found."""
    return (await back_up(url, store(home), settings(url, home), target)).faults


async def everything(backend: Backend) -> list[object]:
    """The whole log in its order, without the transaction ids."""
    events, _ = await backend.log.tail(Cursor(), limit=100)
    return [(e.id, e.stream, e.version, e.event, e.time, e.correlation) for e in events]


async def test_a_backup_is_restored_in_another_place(
    backend: Backend, database_url: str, bare_url: str, tmp_path: Path
) -> None:
    event, weights = await updated(backend, 1, pinned=True)
    await written(backend, event)
    before = await everything(backend)
    assert await copied(database_url, tmp_path / "old", tmp_path / "backup") == ()
    later, later_weights = await updated(backend, 2, pinned=True)
    await written(backend, later)
    new = settings(bare_url, tmp_path / "new")
    contents = await restore(bare_url, store(tmp_path / "new"), new, tmp_path / "backup")
    assert (contents.num_events, len(contents.blobs)) == (1, 1)
    async with open_backend(new) as restored:
        assert await everything(restored) == before
        assert await restored.artifacts.get_artifact(weights, cached=False) == b"weights 1" * 99
        with pytest.raises(NotFound):
            await restored.artifacts.get_artifact(later_weights)
        await written(restored, later)
        assert len(await everything(restored)) == 2, "numbers go on after those that were restored"
    assert await migrate(bare_url) == ()


async def test_a_restore_copies_the_gates_of_requested_runs(
    backend: Backend, database_url: str, bare_url: str, tmp_path: Path
) -> None:
    """An event that requests a run makes its gate, which was backed up too."""
    [asked, *_] = beginning("r", "first", steps=1)
    await written(backend, asked.model_copy(update={"workspace": "w"}))
    gates = "select g::text as gate from run_gates g"
    before = await backend.database.durable.fetch(gates)
    assert len(before) == 1
    await copied(database_url, tmp_path / "old", tmp_path / "backup")
    new = settings(bare_url, tmp_path / "new")
    await restore(bare_url, store(tmp_path / "new"), new, tmp_path / "backup")
    async with open_backend(new) as restored:
        assert await restored.database.durable.fetch(gates) == before


async def test_a_backup_of_an_older_schema_is_brought_to_todays(
    backend: Backend, database_url: str, bare_url: str, tmp_path: Path
) -> None:
    event, weights = await updated(backend, 1, pinned=True)
    await written(backend, event)
    await copied(database_url, tmp_path / "old", tmp_path / "backup")
    file = tmp_path / "backup" / CONTENTS
    document = json.loads(file.read_text())
    del document["migrations"]["0039_run_notes"]
    document["tables"] = [t for t in document["tables"] if t["name"] != "run_notes"]
    file.write_text(json.dumps(document))
    new = settings(bare_url, tmp_path / "new")
    await restore(bare_url, store(tmp_path / "new"), new, tmp_path / "backup")
    async with open_backend(new) as restored:
        assert await restored.artifacts.get_artifact(weights, cached=False) == b"weights 1" * 99


async def test_a_blob_that_cannot_be_copied_is_named(
    backend: Backend, database_url: str, tmp_path: Path
) -> None:
    loose, collected = await updated(backend, 1, pinned=False)
    kept, gone = await updated(backend, 2, pinned=True)
    other, damaged = await updated(backend, 3, pinned=True)
    assert isinstance(loose, PolicyUpdated)
    settled = StepSettled(run="r", step=1, state=loose.state, metrics={})
    await written(backend, loose, settled, kept, other)
    await backend.artifacts.discard(collected)
    await backend.artifacts.discard(gone)
    await backend.blobs.put_blob(f"runs/r/objects/{damaged.sha256}", b"other bytes")
    faults = await copied(database_url, tmp_path / "old", tmp_path / "backup")
    assert len(faults) == 2
    assert gone.uri in faults[0]
    assert "policy-r/2" in faults[0]
    assert "does not exist any more" in faults[0]
    assert damaged.uri in faults[1]
    assert "does not hold the recorded bytes" in faults[1]


async def test_a_name_outside_of_the_blobs_is_a_fault(
    backend: Backend, database_url: str, tmp_path: Path
) -> None:
    stray = reference(b"x", uri="file:///elsewhere/x")
    await written(backend, checkpoint("r", 1, stray))
    faults = await copied(database_url, tmp_path / "old", tmp_path / "backup")
    assert any("file:///elsewhere/x" in fault and "not in the blobs" in fault for fault in faults)


async def test_a_backup_overwrites_nothing(
    backend: Backend, database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "backup").mkdir()
    (tmp_path / "backup" / "mine").touch()
    with pytest.raises(Conflict, match="not empty"):
        await copied(database_url, tmp_path / "old", tmp_path / "backup")
    with pytest.raises(Conflict, match="belongs to the installation"):
        await copied(database_url, tmp_path / "another", tmp_path / "fresh")


async def test_a_restore_overwrites_nothing(
    backend: Backend, database_url: str, bare_url: str, tmp_path: Path
) -> None:
    await copied(database_url, tmp_path / "old", tmp_path / "backup")
    here = settings(database_url, tmp_path / "old")
    with pytest.raises(Conflict, match="database is not empty"):
        await restore(database_url, store(tmp_path / "old"), here, tmp_path / "backup")
    taken = store(tmp_path / "taken")
    await taken.put_blob("installation", b"0" * 32)
    with pytest.raises(Conflict, match="belongs to another installation"):
        await restore(bare_url, taken, here, tmp_path / "backup")


@pytest.mark.parametrize("where", ["tables", "blobs"])
async def test_a_damaged_backup_is_refused_and_leaves_the_database_empty(
    backend: Backend, database_url: str, bare_url: str, tmp_path: Path, where: str
) -> None:
    event, weights = await updated(backend, 1, pinned=True)
    await written(backend, event)
    await copied(database_url, tmp_path / "old", tmp_path / "backup")
    part = "tables/events" if where == "tables" else f"blobs/runs/r/objects/{weights.sha256}"
    file = tmp_path / "backup" / part
    file.write_bytes(file.read_bytes().replace(b"1", b"2", 1))
    new = settings(bare_url, tmp_path / "new")
    with pytest.raises(CorruptData, match=r"does not hold the bytes that were backed up"):
        await restore(bare_url, store(tmp_path / "new"), new, tmp_path / "backup")
    file.unlink()
    with pytest.raises(CorruptData, match="of the backup cannot be read"):
        await restore(bare_url, store(tmp_path / "new"), new, tmp_path / "backup")
    await migrate(bare_url)
    async with open_backend(new) as restored:
        assert await everything(restored) == []


async def test_a_directory_that_is_not_a_backup_is_refused(
    backend: Backend, database_url: str, bare_url: str, tmp_path: Path
) -> None:
    new = settings(bare_url, tmp_path / "new")

    async def refused(why: str) -> None:
        with pytest.raises(InvalidConfig, match=why):
            await restore(bare_url, store(tmp_path / "new"), new, tmp_path / "backup")

    await refused("does not hold a finished backup")
    await copied(database_url, tmp_path / "old", tmp_path / "backup")
    file = tmp_path / "backup" / CONTENTS
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "migrations": {"9999_future": "x"}}))
    await refused("9999_future.*upgrade")
    file.write_text(json.dumps({**document, "format": 2}))
    await refused("not have the format of this version")


async def test_a_database_that_is_not_migrated_is_not_backed_up(
    bare_url: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=r"python -m infra\.spine\.postgres\.migrate"):
        await copied(bare_url, tmp_path / "home", tmp_path / "backup")
