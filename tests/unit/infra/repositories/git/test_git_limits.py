"""The work that a repository can cause is bounded: transfer, listing, depth, names, and time of the
event loop."""

import asyncio
import os
import subprocess
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.repositories.git import process
from infra.repositories.git import tree as git_tree
from infra.repositories.git.mirrors import GitRepositories
from infra.repositories.git.process import run_git
from infra.repositories.git.tree import DEEPEST, LONGEST_PATH, Archive, Listing
from schemas.errors import NotFound, Refused, TransientError
from schemas.specs import CommitSpec
from tests.kit.platform import git


async def snapshot(repositories: GitRepositories, source: Path) -> bytes:
    sha = await repositories.fetch("w", CommitSpec(url=str(source)))
    return await repositories.snapshot("w", sha)


def make(source: Path, *arguments: str, send: bytes) -> str:
    """A git command that reads its input; returns its output."""
    done = subprocess.run(
        ["git", *arguments], cwd=source, input=send, check=True, capture_output=True
    )
    return done.stdout.decode().strip()


def bomb(source: Path, *, levels: int, wide: int, empty: bool) -> None:
    """A commit whose tree lists `wide ** levels` files (or directories without any) out of `levels` tree
    objects."""
    leaf = f"100644 blob {make(source, 'hash-object', '-w', '--stdin', send=b'x')}\tf\n"
    tree = make(source, "mktree", send=b"" if empty else leaf.encode())
    for _ in range(levels):
        names = "".join(f"040000 tree {tree}\td{number}\n" for number in range(wide))
        tree = make(source, "mktree", send=names.encode())
    commit = git(source, "commit-tree", "-m", "bomb", tree)
    git(source, "update-ref", "refs/heads/main", commit)


@pytest.mark.parametrize("empty", [False, True])
async def test_a_tree_that_lists_ten_thousand_million_entries_is_refused_at_the_limit(
    repositories: GitRepositories, source: Path, monkeypatch: pytest.MonkeyPatch, empty: bool
) -> None:
    bomb(source, levels=10, wide=10, empty=empty)
    fed = 0
    feed = Listing.feed

    def counted(listing: Listing, chunk: bytes) -> None:
        nonlocal fed
        fed += len(chunk)
        feed(listing, chunk)

    monkeypatch.setattr(Listing, "feed", counted)
    with pytest.raises(Refused, match="more than 10000 files or directories"):
        await snapshot(repositories, source)
    assert fed < 4 << 20, "the listing ends where the limit is passed"


async def test_twin_without_the_limit_the_listing_goes_on(
    repositories: GitRepositories, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git_tree, "MOST_FILES", 50_000)
    bomb(source, levels=10, wide=10, empty=False)
    seen = 0
    add = Listing._add

    def counted(listing: Listing, line: bytes) -> None:
        nonlocal seen
        seen += 1
        add(listing, line)

    monkeypatch.setattr(Listing, "_add", counted)
    with pytest.raises(Refused):
        await snapshot(repositories, source)
    assert seen > 50_000


def commit_deep(source: Path) -> str:
    """A commit whose tree is one level deeper than allowed; the level of the limit itself is
    accepted."""
    path = source / "/".join(["d"] * (DEEPEST - 1)) / "f"
    path.parent.mkdir(parents=True)
    path.write_text("x")
    git(source, "add", "-A")
    git(source, "commit", "-q", "-m", "deep")
    (path.parent / "e").mkdir()
    (path.parent / "e" / "f").write_text("x")
    return f"levels deep, more than {DEEPEST}"


def commit_long(source: Path) -> str:
    parts = ["d" * 200] * 5
    name = "f" * (LONGEST_PATH + 1 - len("/".join(parts)) - 1)
    path = source / "/".join(parts) / name
    path.parent.mkdir(parents=True)
    path.write_text("x")
    return f"path of more than {LONGEST_PATH} bytes"


def stage(source: Path, name: bytes) -> None:
    blob = make(source, "hash-object", "-w", "--stdin", send=b"x")
    make(source, "update-index", "--index-info", send=f"100644 {blob}\t".encode() + name + b"\n")
    git(source, "commit", "-q", "-m", "staged")


def commit_unwritable(source: Path) -> str:
    stage(source, b"rollouts/" + b"n" * 256)
    return "a name of more than 255 bytes, which no disk holds"


def commit_surrogate(source: Path) -> str:
    stage(source, b"rollouts/\xed\xa0\x80")
    return "is not a UTF-8 file name"


@pytest.mark.parametrize("spoil", [commit_deep, commit_long, commit_unwritable, commit_surrogate])
async def test_paths_beyond_what_disks_hold_are_refused_by_name(
    repositories: GitRepositories, source: Path, spoil: Callable[[Path], str]
) -> None:
    says = spoil(source)
    if spoil in (commit_deep, commit_long):
        await snapshot(repositories, source)
        git(source, "add", "-A")
        git(source, "commit", "-q", "-m", "spoiled")
    with pytest.raises(Refused, match=says):
        await snapshot(repositories, source)


def grown(source: Path, *, commits: int) -> list[str]:
    """The ids of further commits, each with another file."""
    made = []
    for number in range(commits):
        (source / "grows").write_text(f"{commits}{os.urandom(8).hex()}\n" * 100)
        git(source, "add", "-A")
        git(source, "commit", "-q", "-m", str(number))
        made.append(git(source, "rev-parse", "HEAD"))
    return made


def kinds(repository: Path) -> list[str]:
    """The type of each object in a repository."""
    listed = git(repository, "cat-file", "--batch-all-objects", "--batch-check=%(objecttype)")
    return sorted(listed.split())


async def test_a_commit_is_fetched_without_its_history(
    repositories: GitRepositories, source: Path, tmp_path: Path
) -> None:
    shas = grown(source, commits=12)
    mirrors = tmp_path / "mirrors" / "w"
    assert await repositories.fetch("w", CommitSpec(url=str(source))) == shas[-1]
    assert kinds(mirrors / f"{shas[-1]}.git").count("commit") == 1
    for pinned in (shas[3], shas[5][:9], shas[-1]):
        found = await repositories.fetch("w", CommitSpec(url=str(source), sha=pinned))
        assert found.startswith(pinned)
        assert kinds(mirrors / f"{found}.git").count("commit") == 1
        await repositories.snapshot("w", found)
    assert {path.suffix for path in mirrors.iterdir()} == {".git"}


async def test_a_server_that_gives_out_branches_only_gives_a_pinned_commit_too(
    repositories: GitRepositories, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shas = grown(source, commits=3)
    monkeypatch.setattr("infra.repositories.git.mirrors.OURS", "")
    config = process.CONFIG
    monkeypatch.setattr(process, "CONFIG", (*config, "protocol.version=0"))
    pinned = CommitSpec(url=str(source), sha=shas[0])
    assert await repositories.fetch("w", pinned) == shas[0]
    assert await repositories.snapshot("w", shas[0])


async def test_leftovers_of_a_killed_process_are_replaced(
    repositories: GitRepositories, source: Path, tmp_path: Path
) -> None:
    [first, *_] = grown(source, commits=2)
    pinned = CommitSpec(url=str(source), sha=first)
    await repositories.fetch("w", pinned)
    mirror = tmp_path / "mirrors" / "w" / f"{first}.git"
    for path in (mirror / "objects").rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            path.write_bytes(b"")
    with pytest.raises(TransientError):
        await repositories.snapshot("w", first)
    await repositories.fetch("w", pinned)
    assert await repositories.snapshot("w", first)


async def test_only_the_commits_used_last_are_kept(
    repositories: GitRepositories, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.repositories.git.storage.KEPT", 2)

    async def kept_after(fetches: int) -> int:
        for _ in range(fetches):
            [sha] = grown(source, commits=1)
            assert await repositories.fetch("w", CommitSpec(url=str(source))) == sha
        return len(list((tmp_path / "mirrors" / "w").glob("*.git")))

    assert await kept_after(5) == 5, "they are in use"
    monkeypatch.setattr("infra.repositories.git.storage.MOST_KEPT", 3)
    assert await kept_after(2) == 4
    monkeypatch.setattr("infra.repositories.git.storage.IN_USE_S", 0.0)
    assert await kept_after(2) == 3


def many(source: Path, *, files: int) -> None:
    """A commit with many files at depth 30, made without a working tree."""
    blob = make(source, "hash-object", "-w", "--stdin", send=b"x")
    deep = "/".join(["d"] * 30)
    lines = "".join(f"100644 {blob}\t{deep}/{number}\n" for number in range(files))
    make(source, "update-index", "--index-info", send=lines.encode())
    git(source, "commit", "-q", "-m", "many")


async def test_a_tree_costs_the_event_loop_nothing_and_each_name_is_looked_at_once(
    repositories: GitRepositories, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing and archive are made in other threads, so the loop of the control process, which answers
    `/healthz`, runs meanwhile. Linear: one normalisation for each entry, not for each of its parents."""
    many(source, files=9000)
    threads, names = set[int](), 0
    listed, archived, normalize = Listing.feed, Archive.feed, unicodedata.normalize

    def in_thread(feed: Callable[..., None]) -> Callable[..., None]:
        def watched(taker: object, chunk: bytes) -> None:
            threads.add(threading.get_ident())
            feed(taker, chunk)

        return watched

    def counted(form: Any, text: str) -> str:
        nonlocal names
        names += 1
        return normalize(form, text)

    monkeypatch.setattr(Listing, "feed", in_thread(listed))
    monkeypatch.setattr(Archive, "feed", in_thread(archived))
    monkeypatch.setattr(unicodedata, "normalize", counted)
    await snapshot(repositories, source)
    assert threads
    assert threading.get_ident() not in threads
    assert 9000 <= names <= 9100


async def test_twin_inline_the_same_work_holds_the_loop(
    repositories: GitRepositories, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def inline(function: Callable[..., object], *arguments: object, **named: Any) -> object:
        return function(*arguments, **named)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    threads = set[int]()
    feed = Listing.feed

    def watched(listing: Listing, chunk: bytes) -> None:
        threads.add(threading.get_ident())
        feed(listing, chunk)

    monkeypatch.setattr(Listing, "feed", watched)
    await snapshot(repositories, source)
    assert threading.get_ident() in threads


async def test_git_and_its_children_run_under_limits() -> None:
    said = await run_git("-c", "alias.limits=!cat /proc/self/limits", "limits")
    limits = {line[:25].strip(): line[25:].split() for line in said.decode().splitlines()}
    assert limits["Max cpu time"][:2] == [str(process.CPU_S), str(process.CPU_S + 10)]
    assert limits["Max address space"][:2] == [str(process.ADDRESS_BYTES)] * 2
    assert limits["Max file size"][:2] == [str(process.FILE_BYTES)] * 2
    assert int(limits["Max processes"][0]) <= process.PROCESSES
    assert limits["Max core file size"][0] == "0"


async def test_a_transfer_beyond_the_limit_is_refused_for_good(
    repositories: GitRepositories, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "noise").write_bytes(os.urandom(1 << 20))
    git(source, "add", "-A")
    git(source, "commit", "-q", "-m", "noise")
    monkeypatch.setattr(process, "FILE_BYTES", 1 << 16)
    with pytest.raises(Refused, match="have to be transferred"):
        await repositories.fetch("w", CommitSpec(url=str(source)))
    monkeypatch.setattr(process, "FILE_BYTES", 1 << 30)
    await repositories.fetch("w", CommitSpec(url=str(source)))  # the twin: it was the limit


@pytest.mark.parametrize("which", [{"branch": "main\n"}, {"sha": "0123456\n"}])
async def test_a_name_that_ends_in_a_newline_is_refused(
    repositories: GitRepositories, source: Path, which: dict[str, str]
) -> None:
    with pytest.raises(Refused, match=r"is not (a branch name|7 to 40 hex digits)") as raised:
        await repositories.fetch("w", CommitSpec(url=str(source), **which))
    assert not isinstance(raised.value, NotFound)
