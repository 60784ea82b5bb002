"""A directory of the server that git cannot use as a repository is refused with the reason."""

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path

import pytest

from infra.repositories.git import pipes, refs
from infra.repositories.git.mirrors import GitRepositories
from infra.settings.git import LAPTOP
from schemas.errors import NotFound, Refused, RepositoryAway
from schemas.specs import CommitSpec
from tests.kit.platform import git

GIT_FILES = {
    "leads to itself": b"gitdir: .git",
    "leads to another that leads back": b"gitdir: ../other/.git",
    "leads to nothing": b"gitdir: /nonexistent",
    "leads to a directory that is not a repository": b"gitdir: /etc",
    "leads nowhere": b"gitdir: \n",
    "is not one": b"junk\n",
    "is empty": b"",
    "is too large": bytes(2 << 20),
}
"""What a file `.git` does -> its content."""


@pytest.mark.parametrize("kind", GIT_FILES)
async def test_a_git_file_that_does_not_lead_to_a_repository_is_refused(
    kind: str, tmp_path: Path
) -> None:
    repositories = GitRepositories(tmp_path / "mirrors", settings=LAPTOP)
    for name, content in (("source", GIT_FILES[kind]), ("other", b"gitdir: ../source/.git")):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".git").write_bytes(content)
    with pytest.raises(NotFound, match=r"has a file \.git that does not lead to a repository"):
        await repositories.check(str(tmp_path / "source"))


PIPES = (
    "HEAD",
    "config",
    "packed-refs",
    "commondir",
    "refs/heads/main",
    "refs/tags/v1",
    "objects/info/alternates",
    "objects/OBJECT",
    "objects/pack/pack-1.idx",
)


def put_pipe(source: Path, name: str) -> Path:
    """Put a named pipe in place of a file of a repository, or of the newest commit."""
    sha = git(source, "rev-parse", "HEAD").strip()
    pipe = source / ".git" / name.replace("OBJECT", f"{sha[:2]}/{sha[2:]}")
    pipe.parent.mkdir(parents=True, exist_ok=True)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    return pipe


async def refuse(work: Awaitable[object], pipe: Path) -> None:
    """Wait until work is refused because of a pipe, and not for as long as git would wait."""
    with pytest.raises(Refused, match=r"is a named pipe; remove it") as refused:
        async with asyncio.timeout(20):
            await work
    assert str(pipe) in str(refused.value)
    assert refused.value.status == 400


@pytest.mark.parametrize("name", PIPES)
async def test_a_repository_with_a_named_pipe_is_refused(
    name: str, source: Path, repositories: GitRepositories
) -> None:
    pipe = put_pipe(source, name)
    await refuse(repositories.check(str(source)), pipe)
    await refuse(repositories.check(f"file://{source}"), pipe)
    await refuse(repositories.list_refs("w", str(source)), pipe)
    await refuse(repositories.fetch("w", CommitSpec(url=str(source))), pipe)


async def test_a_named_pipe_of_another_directory_that_git_reads_is_found(
    source: Path, tmp_path: Path, repositories: GitRepositories
) -> None:
    shared, tree = tmp_path / "shared", tmp_path / "tree"
    git(source, "clone", "--quiet", "--shared", str(source), str(shared))
    git(source, "worktree", "add", "--quiet", str(tree))
    for place in (shared, tree):
        await repositories.check(str(place))
    pipe = put_pipe(source, "objects/OBJECT")
    for place in (shared, tree):
        await refuse(repositories.check(str(place)), pipe)


async def test_a_link_to_a_named_pipe_is_found_and_loops_of_links_end(
    source: Path, tmp_path: Path, repositories: GitRepositories
) -> None:
    (source / ".git" / "refs" / "heads" / "loop").symlink_to(source / ".git" / "refs")
    (source / ".git" / "objects" / "info" / "itself").symlink_to("itself")
    await repositories.check(str(source))
    os.mkfifo(tmp_path / "pipe")
    link = source / ".git" / "refs" / "heads" / "link"
    link.symlink_to(tmp_path / "pipe")
    await refuse(repositories.check(str(source)), link)


async def test_pipes_that_git_does_not_open_change_nothing(
    source: Path, repositories: GitRepositories
) -> None:
    os.mkfifo(source / "pipe")
    (source / ".git" / "tool").mkdir()
    os.mkfifo(source / ".git" / "tool" / "pipe")
    (source / ".git" / "objects" / "info" / "alternates").write_text(f"{source}\n")
    assert await repositories.check(str(source)) == "main"


async def test_twin_without_the_search_git_waits_for_the_pipe(
    source: Path, repositories: GitRepositories, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_pipe(source, "HEAD")
    monkeypatch.setattr(pipes, "MOST_ENTRIES", 0)
    monkeypatch.setattr(refs, "ASK_S", 2.0)
    with pytest.raises(RepositoryAway, match="no answer within 2 s"):
        await repositories.check(str(source))
