"""The commits of a push: fetched alone, compared by their trees, and read without following links."""

import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from infra.repositories.git import commits, contents, process, storage
from infra.repositories.git.mirrors import GitRepositories
from infra.settings.git import LAPTOP
from schemas.errors import NotFound, Refused, RepositoryAway, TransientError
from schemas.specs import CommitSpec, Push
from tests.kit.git_server import GitServer, git_server
from tests.kit.platform import git, make_workspace

MAIN = "refs/heads/main"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_workspace(tmp_path / "served" / "source")


@pytest.fixture
def server(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitServer]:
    with git_server(source.parent) as serving:
        yield serving


@pytest.fixture
def invocations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands of git that reach a repository."""
    found: list[tuple[str, ...]] = []
    run = process.run_git

    async def counted(*arguments: str, **options: Any) -> bytes:
        if options.get("source") is not None:
            found.append(arguments)
        return await run(*arguments, **options)

    monkeypatch.setattr(commits, "run_git", counted)
    monkeypatch.setattr("infra.repositories.git.refs.run_git", counted)
    return found


def commit(source: Path, **files: str) -> str:
    """A further commit. Returns its id."""
    for name, text in files.items():
        (source / name).write_text(text)
    git(source, "add", "-A")
    git(source, "commit", "-q", "--allow-empty", "-m", "more")
    return git(source, "rev-parse", "HEAD")


def give(source: Path, *arguments: str, send: str) -> None:
    """Run a git command that reads its input."""
    user = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *user, *arguments], cwd=source, input=send.encode(), check=True)


def pushed(source: Path | str, before: str | None, after: str, *, ref: str = MAIN) -> Push:
    return Push(
        workspace="w",
        workspace_name="mine",
        url=str(source),
        number=1,
        ref=ref,
        before=before,
        after=after,
    )


def spec(source: Path | str, sha: str, ref: str = MAIN) -> CommitSpec:
    return CommitSpec(url=str(source), sha=sha, ref=ref)


async def test_a_pushed_commit_costs_one_transfer_and_no_history(
    repositories: GitRepositories, source: Path, tmp_path: Path, invocations: list[tuple[str, ...]]
) -> None:
    sha = commit(source, more="x")
    assert await repositories.fetch("w", spec(source, sha)) == sha
    assert [arguments[0] for arguments in invocations] == ["fetch"]
    assert await repositories.fetch("w", spec(source, sha)) == sha
    assert len(invocations) == 1, "it is there already"
    assert git(tmp_path / "mirrors" / "w" / f"{sha}.git", "rev-list", "--count", sha) == "1"


async def test_a_push_of_3000_commits_transfers_one(
    repositories: GitRepositories, source: Path, tmp_path: Path
) -> None:
    before = git(source, "rev-parse", "HEAD")
    lines = [
        f"commit {MAIN}\ncommitter t <t@e.org> {n} +0000\ndata 1\nx\n"
        + (f"from {before}\n" if n == 1 else "")
        + f"M 100644 inline f{n % 10}\ndata {len(str(n))}\n{n}\n"
        for n in range(1, 3001)
    ]
    give(source, "fast-import", "--quiet", send="".join(lines))
    after = git(source, "rev-parse", MAIN)
    assert await repositories.fetch("w", spec(source, after)) == after
    assert git(tmp_path / "mirrors" / "w" / f"{after}.git", "rev-list", "--count", after) == "1"
    changed = await repositories.changed_paths(pushed(source, before, after))
    assert changed == tuple(f"f{n}" for n in range(10))


async def test_a_commit_that_was_pushed_over_is_given_out_or_refused(
    repositories: GitRepositories, source: Path
) -> None:
    old = commit(source, more="x")
    git(source, "reset", "-q", "--hard", "HEAD~1")
    new = commit(source, more="y")
    assert await repositories.fetch("w", spec(source, old)) == old, "the server still gives it out"
    git(source, "reflog", "expire", "--expire=now", "--all")
    git(source, "gc", "-q", "--prune=now")
    gone = GitRepositories(repositories._root / "again", settings=LAPTOP)
    with pytest.raises(NotFound, match="is not there any more; push it again"):
        await gone.fetch("w", spec(source, old))
    assert await gone.fetch("w", spec(source, new)) == new


async def test_a_server_that_gives_out_refs_only_is_asked_for_the_ref(
    repositories: GitRepositories, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_alone, asked = commits.fetch_alone, list[str]()

    async def refs_only(folder: Path, source: process.GitSource, wanted: str) -> str:
        asked.append(wanted)
        if not wanted.startswith("refs/"):
            raise process.GitFailed(
                128, "error: Server does not allow request for unadvertised object"
            )
        return await fetch_alone(folder, source, wanted)

    monkeypatch.setattr(commits, "fetch_alone", refs_only)
    old = git(source, "rev-parse", "HEAD")
    assert await repositories.fetch("w", spec(source, old)) == old
    assert asked == [old, MAIN]
    commit(source, more="x")
    with pytest.raises(NotFound, match="not there any more"):
        await GitRepositories(repositories._root / "again", settings=LAPTOP).fetch(
            "w", spec(source, old)
        )


async def test_an_annotated_tag_is_fetched_by_its_commit(
    repositories: GitRepositories, source: Path
) -> None:
    git(source, "tag", "-a", "-m", "x", "v1")
    [sha] = set((await repositories.list_refs("w", str(source))).refs.values())
    assert await repositories.fetch("w", spec(source, sha, "refs/tags/v1")) == sha


@pytest.mark.parametrize(
    ("sha", "ref"),
    [("a" * 40, "refs/heads/--upload-pack=x"), ("--all", MAIN), ("a" * 39, MAIN), ("a" * 40, "x")],
)
async def test_unsafe_names_reach_no_git(
    repositories: GitRepositories,
    source: Path,
    invocations: list[tuple[str, ...]],
    sha: str,
    ref: str,
) -> None:
    with pytest.raises(Refused, match="is not a ref and a commit"):
        await repositories.fetch("w", spec(source, sha, ref))
    assert invocations == []


async def test_changed_paths_are_those_of_the_two_trees(
    repositories: GitRepositories, source: Path, invocations: list[tuple[str, ...]]
) -> None:
    before = commit(source, a="1", b="1", c="1")
    commit(source, a="2", b="2")
    (source / "c").rename(source / "d")
    after = commit(source, a="1")
    assert await repositories.changed_paths(pushed(source, before, after)) == ("b", "c", "d")
    assert len(invocations) == 1, "both commits come in one transfer"
    assert await repositories.changed_paths(pushed(source, after, before)) == ("b", "c", "d")
    assert await repositories.changed_paths(pushed(source, after, after)) == ()


async def test_commits_that_are_there_are_compared_without_a_transfer(
    repositories: GitRepositories, source: Path, invocations: list[tuple[str, ...]]
) -> None:
    before = commit(source, a="1")
    await repositories.fetch("w", spec(source, before))
    after = commit(source, a="2")
    await repositories.fetch("w", spec(source, after))
    assert len(invocations) == 2
    assert await repositories.changed_paths(pushed(source, before, after)) == ("a",)
    assert len(invocations) == 2


async def test_over_http_the_files_of_compared_commits_stay_there(
    server: GitServer, repositories: GitRepositories, source: Path
) -> None:
    git(source, "config", "uploadpack.allowFilter", "true")
    before = commit(source, a="1")
    after = commit(source, a="2", größe="x")
    url = server.url("source/.git")
    assert await repositories.changed_paths(pushed(url, before, after)) == ("a", "größe")
    git(source, "config", "uploadpack.allowFilter", "false")
    assert await repositories.changed_paths(pushed(url, before, after)) == ("a", "größe")
    server.status = 503
    with pytest.raises(RepositoryAway):
        await repositories.changed_paths(pushed(url, before, after))


async def test_a_commit_before_that_is_not_given_out_means_all_paths(
    server: GitServer, repositories: GitRepositories, source: Path
) -> None:
    after = git(source, "rev-parse", "HEAD")
    assert await repositories.changed_paths(pushed(source, None, after)) is None
    for url in (str(source), server.url("source/.git")):
        assert await repositories.changed_paths(pushed(url, "a" * 40, after)) is None


async def test_too_many_changed_paths_mean_all_paths(
    repositories: GitRepositories, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = git(source, "rev-parse", "HEAD")
    after = commit(source, **{f"f{number}": "x" for number in range(30)})
    monkeypatch.setattr(contents, "MOST_CHANGED", 29)
    assert await repositories.changed_paths(pushed(source, before, after)) is None
    monkeypatch.setattr(contents, "MOST_CHANGED", 30)
    found = await repositories.changed_paths(pushed(source, before, after))
    assert found is not None
    assert len(found) == 30


async def test_commits_before_push_out_no_commit_in_use(
    repositories: GitRepositories, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "KEPT", 1)
    monkeypatch.setattr(storage, "IN_USE_S", 0.0)
    used = git(source, "rev-parse", "HEAD")
    await repositories.fetch("w", spec(source, used))
    others = [commit(source, a=str(number)) for number in range(4)]
    for before, after in pairwise(others):
        await repositories.changed_paths(pushed(source, before, after))
    assert [p.name for p in (tmp_path / "mirrors" / "w").iterdir()] == [f"{used}.git"]


async def read(
    repositories: GitRepositories, source: Path, path: str, *, most: int = 1000
) -> bytes | None:
    sha = git(source, "rev-parse", "HEAD")
    await repositories.fetch("w", spec(source, sha))
    return await repositories.read_file("w", sha, path, most=most)


async def test_a_file_is_read_from_its_commit(repositories: GitRepositories, source: Path) -> None:
    (source / "configs").mkdir()
    commit(source, **{"headrace.toml": "[[trigger]]\n", "configs/rl.toml": "x" * 1000, "*": "star"})
    assert await read(repositories, source, "headrace.toml") == b"[[trigger]]\n"
    assert await read(repositories, source, "configs/rl.toml") == b"x" * 1000
    assert await read(repositories, source, "*") == b"star"
    for absent in ("absent", "configs/absent", "headrace.toml/x", "con*", ":(glob)**"):
        assert await read(repositories, source, absent) is None


async def test_a_file_that_is_too_large_is_not_read(
    repositories: GitRepositories, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(source, large="x" * 1001)
    run, read_there = process.run_git, list[str]()

    async def counted(*arguments: str, **options: Any) -> bytes:
        read_there.append(arguments[0])
        return await run(*arguments, **options)

    monkeypatch.setattr(contents, "run_git", counted)
    with pytest.raises(Refused, match="large has 1001 bytes, more than 1000"):
        await read(repositories, source, "large")
    assert "cat-file" not in read_there


async def test_links_directories_and_submodules_are_not_read(
    repositories: GitRepositories, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "rl.toml").write_text("secret")
    (source / "configs").symlink_to(tmp_path / "outside")
    (source / "rl.toml").symlink_to(tmp_path / "outside" / "rl.toml")
    commit(source)
    sha = git(source, "rev-parse", "HEAD")
    git(source, "update-index", "--add", "--cacheinfo", f"160000,{sha},module")
    git(source, "commit", "-q", "-m", "module")
    for path, says in (
        ("rl.toml", "rl.toml is a symbolic link"),
        ("configs/rl.toml", "configs is a symbolic link"),
        ("module", "module is a submodule"),
        ("module/rl.toml", "module is a submodule"),
        ("rollouts", "rollouts is a directory"),
    ):
        with pytest.raises(Refused, match=says):
            await read(repositories, source, path)


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\n", "a\\b", "x" * 1025]
)
async def test_a_path_outside_of_the_repository_is_refused(
    repositories: GitRepositories, source: Path, path: str
) -> None:
    with pytest.raises(Refused, match="is not a path inside the repository"):
        await read(repositories, source, path)


async def test_the_message_of_a_commit_is_read(repositories: GitRepositories, source: Path) -> None:
    for text, found in (
        ("add x [skip train]\n\nwhy größe\n", "add x [skip train]\n\nwhy größe"),
        ("y" * (70 << 10), "y" * contents.LONGEST_MESSAGE),
    ):
        give(source, "commit", "-q", "--allow-empty", "-F", "-", send=text)
        sha = git(source, "rev-parse", "HEAD")
        await repositories.fetch("w", spec(source, sha))
        assert await repositories.message("w", sha) == found


async def test_a_broken_copy_is_fetched_again(
    repositories: GitRepositories, source: Path, tmp_path: Path
) -> None:
    before = commit(source, a="1")
    after = commit(source, a="2")
    mirror = tmp_path / "mirrors" / "w" / f"{after}.git"
    for sha in (before, after):
        await repositories.fetch("w", spec(source, sha))
    for attempt in (
        lambda: repositories.read_file("w", after, "a", most=10),
        lambda: repositories.message("w", after),
        lambda: repositories.changed_paths(pushed(source, before, after)),
    ):
        for path in [*mirror.glob("objects/pack/*"), *mirror.glob("objects/??/*")]:
            path.chmod(0o600)
            path.write_bytes(b"")
        with pytest.raises(TransientError):
            await attempt()
        assert not mirror.exists()
        await repositories.fetch("w", spec(source, after))
        await repositories.fetch("w", spec(source, before))
        assert await attempt()


async def test_an_unsafe_commit_before_means_all_paths(
    repositories: GitRepositories, source: Path
) -> None:
    after = git(source, "rev-parse", "HEAD")
    assert await repositories.changed_paths(pushed(source, "--output=/tmp/x", after)) is None
