"""The refs of a real repository, whatever it is called, holds, or became since the last time."""

from pathlib import Path

import pytest

from infra.ports.services import RefList
from infra.repositories.git import refs as git_refs
from infra.repositories.git.mirrors import GitRepositories
from infra.repositories.git.refs import is_safe_ref, read_listing
from schemas.errors import InvalidConfig, NotFound, Refused
from schemas.specs import CommitSpec
from tests.kit.platform import git

MAIN = "refs/heads/main"


async def listed(repositories: GitRepositories, source: Path) -> RefList:
    return await repositories.list_refs("w", str(source))


def head(source: Path) -> str:
    return git(source, "rev-parse", "HEAD")


async def test_branches_and_tags_are_listed_with_their_commits(
    repositories: GitRepositories, source: Path
) -> None:
    git(source, "branch", "team/x")
    git(source, "tag", "light")
    git(source, "tag", "-a", "-m", "annotated", "v1")
    git(source, "tag", "-a", "-m", "a tag of a tag", "v2", "v1")
    git(source, "update-ref", "refs/pull/1/head", "HEAD")
    git(source, "update-ref", "refs/x/refs/heads/y", "HEAD")
    found = await listed(repositories, source)
    names = (MAIN, "refs/heads/team/x", "refs/tags/light", "refs/tags/v1", "refs/tags/v2")
    assert found.refs == dict.fromkeys(names, head(source))
    assert found.default_branch == "main"


async def test_a_digest_changes_with_the_refs_alone(
    repositories: GitRepositories, source: Path
) -> None:
    first = await listed(repositories, source)
    git(source, "update-ref", "refs/pull/1/head", "HEAD")
    assert await listed(repositories, source) == first
    git(source, "commit", "-q", "--allow-empty", "-m", "more")
    second = await listed(repositories, source)
    git(source, "reset", "-q", "--hard", "HEAD~1")
    assert await listed(repositories, source) == first, "a force-push back is the old listing"
    git(source, "branch", "other")
    third = await listed(repositories, source)
    assert len({one.digest for one in (first, second, third)}) == 3


async def test_a_branch_named_like_a_tag_is_two_refs(
    repositories: GitRepositories, source: Path
) -> None:
    git(source, "tag", "v1")
    git(source, "commit", "-q", "--allow-empty", "-m", "more")
    git(source, "branch", "v1")
    found = await listed(repositories, source)
    assert found.refs["refs/heads/v1"] == head(source) != found.refs["refs/tags/v1"]
    for ref in ("refs/heads/v1", "refs/tags/v1"):
        spec = CommitSpec(url=str(source), sha=found.refs[ref], ref=ref)
        assert await repositories.fetch("w", spec) == found.refs[ref]


async def test_an_empty_repository_lists_nothing(
    repositories: GitRepositories, tmp_path: Path
) -> None:
    git(tmp_path, "init", "-q", "empty")
    found = await listed(repositories, tmp_path / "empty")
    assert (found.refs, found.default_branch) == ({}, None)


async def test_a_renamed_repository_is_missing_until_it_is_back(
    repositories: GitRepositories, source: Path, tmp_path: Path
) -> None:
    before = await repositories.list_refs("w", f"file://{source}")
    source.rename(tmp_path / "moved")
    with pytest.raises(NotFound, match=r"is not a git repository: .*`git init`"):
        await repositories.list_refs("w", f"file://{source}")
    (tmp_path / "moved").rename(source)
    assert await repositories.list_refs("w", f"file://{source}") == before


async def test_strange_names_are_left_out(repositories: GitRepositories, source: Path) -> None:
    packed = source / ".git" / "packed-refs"
    names = [b"refs/heads/--upload-pack=x", b"refs/heads/\xff\xfe", b"refs/tags/ok"]
    lines = [head(source).encode() + b" " + name + b"\n" for name in names]
    packed.write_bytes(b"# pack-refs with: peeled fully-peeled sorted \n" + b"".join(lines))
    found = await listed(repositories, source)
    assert set(found.refs) == {MAIN, "refs/tags/ok"}


@pytest.mark.parametrize(
    "name",
    [
        "main",
        "HEAD",
        "refs/heads/",
        "refs/pull/1/head",
        "refs/heads/--upload-pack=x",
        "refs/heads/a/-x",
        "refs/heads/a//b",
        "refs/heads/../../x",
        "refs/heads/.hidden",
        "refs/heads/x.lock",
        "refs/heads/a b",
        "refs/heads/a\tb",
        "refs/heads/a\x1b[31m",
        "refs/heads/a\u202eb",
        'refs/heads/"',
        "refs/heads/\N{REPLACEMENT CHARACTER}",
        "refs/heads/@{u}",
        "refs/heads/" + "x" * 255,
    ],
)
def test_unsafe_names_are_refused(name: str) -> None:
    assert not is_safe_ref(name)


@pytest.mark.parametrize(
    "name", [MAIN, "refs/heads/team/größe", "refs/tags/v1.0-rc+1", "refs/heads/#1"]
)
def test_safe_names_are_accepted(name: str) -> None:
    assert is_safe_ref(name)


def test_a_listing_of_nonsense_is_empty() -> None:
    said = b"ref: refs/heads/gone\tHEAD\nxyz\trefs/heads/a\n\n\t\n\xff\xff\t\xff\n" + b"0" * 41
    found = read_listing(said, url="x")
    assert (found.refs, found.default_branch) == ({}, None)


def test_a_peeled_tag_that_was_not_listed_is_left_out() -> None:
    said = f"{'a' * 40}\trefs/tags/v1^{{}}\n".encode()
    assert read_listing(said, url="x").refs == {}


async def test_a_repository_with_too_many_refs_is_refused(
    repositories: GitRepositories, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = head(source)
    lines = "".join(f"{sha} refs/heads/b{number:05}\n" for number in range(10_000))
    (source / ".git" / "packed-refs").write_text(lines)
    with pytest.raises(Refused, match=r"10001 branches and tags.*delete old ones"):
        await listed(repositories, source)
    monkeypatch.setattr(git_refs, "MOST_REFS", 10_001)  # the twin: it was the limit
    assert len((await listed(repositories, source)).refs) == 10_001


async def test_a_default_branch_without_a_commit_is_told_apart_from_an_empty_repository(
    repositories: GitRepositories, source: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "team.git"
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch=trunk", str(bare))
    with pytest.raises(InvalidConfig, match="has no commits; push a commit first"):
        await repositories.fetch("w", CommitSpec(url=str(bare)))
    git(source, "push", "--quiet", str(bare), f"{MAIN}:{MAIN}")
    with pytest.raises(InvalidConfig, match=r"but on main; .* symbolic-ref HEAD refs/heads/main"):
        await repositories.fetch("w", CommitSpec(url=str(bare)))
