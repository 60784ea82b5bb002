"""Which database belongs to which blobs, and to which version of the code."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from infra.adapters import open_backend
from infra.blobs.installation import KEY, identity
from infra.blobs.local import LocalBlobs
from infra.blobs.memory import MemoryBlobs
from infra.settings.settings import Settings
from infra.spine.postgres import migrate
from schemas.errors import Conflict, CorruptData, InvalidConfig
from tests.kit.postgres import database_of, execute

pytestmark = pytest.mark.postgres


def settings(home: Path, url: str, **more: str) -> Settings:
    return Settings.load({"HEADRACE_HOME": str(home), "HEADRACE_DATABASE_URL": url, **more})


@pytest.fixture
def bare_url(postgres_url: str, database_url: str) -> Iterator[str]:
    """A database without any schema, on a server that has the role."""
    name = f"t{uuid4().hex[:12]}"
    asyncio.run(execute(postgres_url, f"create database {name}"))
    yield database_of(postgres_url, name)
    asyncio.run(execute(postgres_url, f"drop database {name} with (force)"))


async def opened(with_settings: Settings) -> None:
    async with open_backend(with_settings):
        pass


async def test_another_installation_on_the_same_database_is_refused_and_told_whose_it_is(
    database_url: str, tmp_path: Path
) -> None:
    await opened(settings(tmp_path / "one", database_url))
    await opened(settings(tmp_path / "one", database_url))
    with pytest.raises(Conflict) as refused:
        await opened(settings(tmp_path / "two", database_url))
    assert str(tmp_path / "one") in refused.value.message
    shared = f"file://{tmp_path}/one/blobs"
    await opened(settings(tmp_path / "two", database_url, HEADRACE_BLOBS=shared))


async def test_blobs_that_were_removed_are_told_from_another_installation(
    database_url: str, tmp_path: Path
) -> None:
    await opened(settings(tmp_path / "one", database_url))
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(Conflict, match=r"removed or replaced.*remove /") as refused:
        await opened(settings(tmp_path / "one", database_url))
    assert "another" not in refused.value.message


async def test_a_blob_store_keeps_its_id(tmp_path: Path) -> None:
    for blobs in (LocalBlobs(tmp_path), MemoryBlobs()):
        assert await identity(blobs) == await identity(blobs)
    assert await identity(LocalBlobs(tmp_path)) != await identity(MemoryBlobs())
    await LocalBlobs(tmp_path).put_blob(KEY, b"not an id")
    with pytest.raises(CorruptData, match="what else writes"):
        await identity(LocalBlobs(tmp_path))


async def test_a_database_without_a_schema_is_refused_with_what_to_do(
    bare_url: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=r"python -m infra\.spine\.postgres\.migrate"):
        await opened(settings(tmp_path, bare_url))


async def test_a_newer_database_is_refused(database_url: str, tmp_path: Path) -> None:
    newer = "insert into migrations (name, checksum) values ('9999_future', 'x')"
    await execute(database_url, newer)
    with pytest.raises(InvalidConfig, match=r"9999_future.*upgrade"):
        await opened(settings(tmp_path, database_url))
    with pytest.raises(InvalidConfig, match=r"9999_future.*upgrade"):
        await migrate.migrate(database_url)


async def test_a_migration_that_changed_after_it_was_applied_is_refused(database_url: str) -> None:
    await execute(database_url, "update migrations set checksum = 'x' where name = '0032_base'")
    with pytest.raises(InvalidConfig, match="0032_base was changed"):
        await migrate.migrate(database_url)


def test_the_command_says_what_it_did_and_why_not(
    bare_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HEADRACE_DATABASE_URL", raising=False)
    assert migrate.main() == 1
    assert "HEADRACE_DATABASE_URL is not set" in capsys.readouterr().err
    monkeypatch.setenv("HEADRACE_DATABASE_URL", bare_url)
    assert migrate.main() == 0
    assert "0032_base" in capsys.readouterr().out
    assert migrate.main() == 0
    assert "nothing" in capsys.readouterr().out
