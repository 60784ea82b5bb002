"""The mirrors of a workspace have a quota, and what nobody uses is removed."""

import os
import time
from pathlib import Path

import pytest

from infra.repositories.git import storage
from infra.repositories.git.mirrors import GitRepositories
from infra.repositories.git.storage import MirrorStorage, size_of
from infra.settings.git import GitSettings
from schemas.errors import Refused
from schemas.specs import CommitSpec
from tests.kit.platform import git, make_workspace

MB = 1 << 20


def mirror(folder: Path, number: int, *, size: int, used_s_ago: float = 0.0) -> Path:
    """A mirror of a commit with this many bytes, last used so many seconds ago."""
    path = folder / f"{number:040x}.git"
    path.mkdir(parents=True)
    (path / "pack").write_bytes(bytes(size))
    _use(path, used_s_ago)
    return path


def _use(path: Path, seconds_ago: float) -> None:
    at = time.time() - seconds_ago
    os.utime(path, (at, at))


def grow(source: Path, size: int) -> None:
    (source / "noise").write_bytes(os.urandom(size))
    git(source, "add", "-A")
    git(source, "commit", "-q", "-m", "noise")


def test_half_of_the_quota_is_kept_and_the_newest_stay(tmp_path: Path) -> None:
    mirrors = [mirror(tmp_path / "w", n, size=2 * MB, used_s_ago=100 - n) for n in range(6)]
    MirrorStorage(tmp_path, quota_bytes=10 * MB).folder("w")
    assert [path.exists() for path in mirrors] == [False] * 4 + [True] * 2


def test_the_quota_holds_for_commits_in_use_too(tmp_path: Path) -> None:
    for number in range(6):
        mirror(tmp_path / "w", number, size=2 * MB)
    MirrorStorage(tmp_path, quota_bytes=10 * MB).folder("w")
    assert size_of(tmp_path / "w") <= 5 * MB


async def test_a_transfer_beyond_the_quota_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = make_workspace(tmp_path / "source")
    grow(source, 3 * MB)
    small, large = (GitSettings(files=True, quota_bytes=size * MB) for size in (4, 16))
    repositories = GitRepositories(tmp_path / "small", settings=small)
    with pytest.raises(Refused, match=r"more than 2 MiB have to be .*HEADRACE_GIT_QUOTA_MB"):
        await repositories.fetch("w", CommitSpec(url=str(source)))
    assert size_of(tmp_path / "small") < MB
    repositories = GitRepositories(tmp_path / "large", settings=large)
    await repositories.fetch("w", CommitSpec(url=str(source)))  # the twin: it was the quota


async def test_many_commits_of_one_workspace_stay_within_its_quota(tmp_path: Path) -> None:
    source = make_workspace(tmp_path / "source")
    settings = GitSettings(files=True, quota_bytes=8 * MB)
    repositories = GitRepositories(tmp_path / "mirrors", settings=settings)
    for _ in range(5):
        grow(source, 2 * MB)
        sha = await repositories.fetch("w", CommitSpec(url=str(source)))
        assert await repositories.snapshot("w", sha)
        assert size_of(tmp_path / "mirrors" / "w") <= 8 * MB


async def test_collecting_removes_what_nobody_uses(tmp_path: Path) -> None:
    month = storage.UNUSED_S + 60
    used = mirror(tmp_path / "used", 1, size=1)
    hours = storage.LEFT_OVER_S + 60
    unknown = mirror(tmp_path / "unknown", 1, size=1, used_s_ago=hours)
    _use(unknown.parent, hours)
    new = mirror(tmp_path / "new", 1, size=1)
    unused = mirror(tmp_path / "unused", 1, size=1, used_s_ago=month)
    _use(unused.parent, month)
    over = [mirror(tmp_path / "over", n, size=3 * MB, used_s_ago=100 - n) for n in range(2)]
    killed, running = tmp_path / "used" / "a.partial", tmp_path / "used" / "b.partial"
    for path in (killed, running, tmp_path / "key-1"):
        path.mkdir()
    _use(killed, storage.LEFT_OVER_S + 60)
    (tmp_path / "config").touch()
    repositories = GitRepositories(tmp_path, settings=GitSettings(quota_bytes=8 * MB))
    assert await repositories.collect({"used", "unused", "over"}) == 2
    assert [path.exists() for path in (used, *over)] == [True, False, True]
    assert not unknown.exists()
    assert new.exists(), "it may have been added just now"
    assert not unused.exists()
    assert [path.exists() for path in (killed, running)] == [False, True]
    assert (tmp_path / "key-1").exists()
    assert (tmp_path / "config").exists()
    assert await repositories.collect() == 0
    assert await GitRepositories(tmp_path / "none").collect() == 0
