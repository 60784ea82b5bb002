"""Git against hostile repositories and hostile arguments."""

from pathlib import Path

import pytest

from infra.repositories.git.mirrors import GitRepositories
from infra.repositories.git.urls import check_url
from infra.settings.git import LAPTOP
from schemas.errors import InvalidConfig, NotFound, Refused
from schemas.specs import CommitSpec
from tests.kit.platform import git


async def snapshot(repositories: GitRepositories, source: Path) -> bytes:
    sha = await repositories.fetch("w", CommitSpec(url=str(source)))
    return await repositories.snapshot("w", sha)


async def test_the_head_a_branch_and_a_pinned_commit_are_fetched(
    repositories: GitRepositories, source: Path
) -> None:
    first = git(source, "rev-parse", "HEAD")
    git(source, "checkout", "-q", "-b", "other")
    (source / "more").write_text("x")
    git(source, "add", "-A")
    git(source, "commit", "-q", "-m", "more")
    second = git(source, "rev-parse", "HEAD")
    assert await repositories.check(str(source)) == "other"
    url = str(source)
    assert await repositories.fetch("w", CommitSpec(url=url)) == second
    assert await repositories.fetch("w", CommitSpec(url=url, branch="main")) == first
    assert await repositories.fetch("w", CommitSpec(url=url, sha=first[:9])) == first


async def test_the_same_commit_is_the_same_bytes(source: Path, tmp_path: Path) -> None:
    one, two = (GitRepositories(tmp_path / name, settings=LAPTOP) for name in ("a", "b"))
    assert await snapshot(one, source) == await snapshot(two, source)


async def test_a_missing_branch_or_commit_is_named(
    repositories: GitRepositories, source: Path
) -> None:
    with pytest.raises(NotFound, match="no branch nowhere"):
        await repositories.fetch("w", CommitSpec(url=str(source), branch="nowhere"))
    with pytest.raises(NotFound, match="0123456789"):
        await repositories.fetch("w", CommitSpec(url=str(source), sha="0123456789"))


async def test_a_commit_that_no_branch_reaches_is_refused(
    repositories: GitRepositories, source: Path
) -> None:
    await repositories.fetch("w", CommitSpec(url=str(source)))
    (source / "gone").write_text("x")
    git(source, "add", "-A")
    git(source, "commit", "-q", "-m", "gone")
    gone = git(source, "rev-parse", "HEAD")
    await repositories.fetch("w", CommitSpec(url=str(source)))
    git(source, "reset", "-q", "--hard", "HEAD~1")
    with pytest.raises(NotFound, match="on any branch"):
        await repositories.fetch("w", CommitSpec(url=str(source), sha=gone))


@pytest.mark.parametrize(
    "url",
    [
        "--upload-pack=touch /tmp/owned",
        "ext::sh -c 'touch /tmp/owned'",
        "http://example.org/x.git",
        "http://127.0.0.1.example.org/x.git",
        "http://user:secret@127.0.0.1/x.git",
        "https://user:secret@example.org/x.git",
        "relative/path",
        "",
        "/tmp/\n",
    ],
)
def test_hostile_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidConfig):
        check_url(url)


@pytest.mark.parametrize("host", ["127.0.0.1:3000", "localhost", "[::1]:3000"])
def test_http_is_taken_only_for_this_machine(host: str) -> None:
    assert check_url(f"http://{host}/team/x.git") == f"http://{host}/team/x.git"


@pytest.mark.parametrize("branch", ["--output=/tmp/owned", "a..b", "a b", ":x"])
async def test_hostile_branches_are_refused(
    repositories: GitRepositories, source: Path, branch: str
) -> None:
    with pytest.raises(InvalidConfig):
        await repositories.fetch("w", CommitSpec(url=str(source), branch=branch))


async def test_a_directory_without_a_commit_is_refused_with_the_reason(
    repositories: GitRepositories, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="is not a git repository"):
        await repositories.check(str(tmp_path / "empty"))
    git(tmp_path / "empty", "init", "-q")
    with pytest.raises(InvalidConfig, match="no commit"):
        await repositories.check(str(tmp_path / "empty"))


async def test_hooks_and_configuration_of_a_repository_never_run(
    repositories: GitRepositories, source: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "owned"
    script = f"#!/bin/sh\ntouch {marker}\n"
    for hook in ("post-checkout", "post-update", "pre-receive", "reference-transaction"):
        path = source / ".git" / "hooks" / hook
        path.write_text(script)
        path.chmod(0o755)
    git(source, "config", "core.fsmonitor", f"touch {marker}")
    git(source, "config", "uploadpack.packObjectsHook", f"touch {marker}; exec")
    await snapshot(repositories, source)
    assert not marker.exists()


def commit_link(source: Path) -> str:
    (source / "link").symlink_to("/etc/passwd")
    return "link is a symbolic link"


def commit_submodule(source: Path) -> str:
    sha = git(source, "rev-parse", "HEAD")
    git(source, "update-index", "--add", "--cacheinfo", f"160000,{sha},module")
    git(source, "commit", "-q", "-m", "module")
    return "module is a submodule"


def commit_git_name(source: Path) -> str:
    (source / ".gitmodules").write_text("[x]")
    return ".gitmodules"


def commit_collision(source: Path) -> str:
    (source / "README").write_text("a")
    (source / "readme").write_text("b")
    return "one name on some systems"


def commit_lfs(source: Path) -> str:
    (source / "weights").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    return "weights is a Git LFS pointer"


@pytest.mark.parametrize(
    "spoil", [commit_link, commit_submodule, commit_git_name, commit_collision, commit_lfs]
)
async def test_trees_that_a_checkout_could_be_tricked_with_are_refused(
    repositories: GitRepositories, source: Path, spoil: object
) -> None:
    assert callable(spoil)
    says = spoil(source)
    if spoil is not commit_submodule:
        git(source, "add", "-A")
        git(source, "commit", "-q", "-m", "spoiled")
    with pytest.raises(Refused, match=says):
        await snapshot(repositories, source)
