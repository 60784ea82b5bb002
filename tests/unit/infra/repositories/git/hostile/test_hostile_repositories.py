"""Every kind of hostile repository is refused, or gives the right files, and has no effect besides."""

import io
import os
import resource
import tarfile
from collections.abc import Awaitable
from pathlib import Path

import pytest

from infra.repositories.git.confinement import find_confinement
from infra.repositories.git.mirrors import GitRepositories
from infra.settings.git import LAPTOP
from schemas.errors import HeadraceError
from schemas.specs import CommitSpec, Push
from tests.kit.raw_repository import RawRepository
from tests.unit.infra.repositories.git.hostile.histories import HISTORIES
from tests.unit.infra.repositories.git.hostile.trees import TREES, Kind

pytestmark = pytest.mark.attacks

KINDS: dict[str, Kind] = {**TREES, **HISTORIES}
MOST_BYTES = 2 << 30
"""The memory that no process of git may pass."""


async def outcome(work: Awaitable[object]) -> object:
    """The result, or the error that users get. All other errors fail the test."""
    try:
        return await work
    except HeadraceError as error:
        return error


async def examine(repositories: GitRepositories, url: str) -> list[object]:
    """Do everything that is done with a repository, and return all results."""
    spec = CommitSpec(url=url, branch="main")
    found = [
        await outcome(repositories.check(url)),
        await outcome(repositories.list_refs("w", url)),
        await outcome(repositories.fetch("w", CommitSpec(url=url))),
        await outcome(repositories.fetch("w", spec)),
        await outcome(repositories.fetch("w", CommitSpec(url=url, sha="6" * 40))),
    ]
    sha = found[3]
    if isinstance(sha, str):
        found[3] = await outcome(repositories.snapshot("w", sha))
        pushed = Push(
            workspace="w",
            workspace_name="w",
            url=url,
            number=1,
            ref="refs/heads/main",
            before=sha,
            after=sha,
        )
        for work in (
            repositories.message("w", sha),
            repositories.changed_paths(pushed),
            repositories.read_file("w", sha, "headrace.toml", most=1000),
        ):
            found.append(await outcome(work))
    return found


def files_of(snapshot: object) -> dict[str, bytes]:
    assert isinstance(snapshot, bytes), snapshot
    with tarfile.open(fileobj=io.BytesIO(snapshot)) as tar:
        read = {member.name: tar.extractfile(member) for member in tar}
        return {name: content.read() for name, content in read.items() if content is not None}


def processes_of(folder: Path) -> list[bytes]:
    """The command lines of processes that name a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if os.fsencode(str(folder)) in line:
            found.append(line)
    return found


def test_there_are_at_least_60_kinds() -> None:
    assert len(KINDS) >= 60


@pytest.mark.parametrize("name", KINDS)
async def test_a_hostile_repository_has_no_effect(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    monkeypatch.setenv("HOME", str(canary))
    kind, url = KINDS[name], str(tmp_path / "source")
    kind.make(RawRepository(Path(url)))
    before = sorted(tmp_path.iterdir())
    confinement = find_confinement("bwrap")
    repositories = GitRepositories(tmp_path / "mirrors", settings=LAPTOP, confinement=confinement)
    found = await examine(repositories, url)
    assert list(canary.iterdir()) == []
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "mirrors"])
    assert processes_of(tmp_path) == []
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10 < MOST_BYTES
    for one in found:
        assert "\x1b" not in str(one) or isinstance(one, bytes | str)
    if kind.holds is not None:
        assert files_of(found[3]) == kind.holds
    else:
        assert isinstance(found[3], HeadraceError)
        with pytest.raises(HeadraceError, match=kind.says):
            raise found[3]
