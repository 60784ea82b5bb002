"""A git failure that says nothing about the repository counts as an outage: the work waits and is
retried.

Real git processes against a real server. The twin takes every failure for the user's fault, as the code
once did, and the same 503 ends the work.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from consumers.sync import consumer
from infra.repositories.git import mirrors
from infra.repositories.git.failures import error_for
from infra.repositories.git.mirrors import GitRepositories
from infra.repositories.git.process import GitFailed, GitTimeout
from infra.spine.ports.effects import Claimed
from infra.spine.runtime.attempt import Attempt, perform_once
from schemas.effects import CommitFetched, Failed, FetchCommit
from schemas.errors import NotFound, Refused, RepositoryAway, TransientError
from schemas.ids import ConsumerName, StreamName
from schemas.specs import CommitSpec
from tests.kit.fakes import FakeUserCode, bench
from tests.kit.git_server import GitServer, git_server
from tests.kit.platform import git, make_workspace


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitServer]:
    """A server on this machine has no certificate, so plain HTTP is allowed here only."""
    make_workspace(tmp_path / "served" / "source")
    with git_server(tmp_path / "served") as serving:
        yield serving


def head(server: GitServer) -> str:
    return git(server.root / "source", "rev-parse", "HEAD")


def commit(server: GitServer, **which: str) -> CommitSpec:
    return CommitSpec(url=server.url("source/.git"), **which)


async def performed(
    server: GitServer, repositories: GitRepositories, tmp_path: Path, **which: str
) -> Attempt:
    """Make one attempt at the effect that fetches."""
    effect = FetchCommit(
        workspace="w", request=UUID(int=1), commit=commit(server, **which), entrypoints=()
    )
    claimed = Claimed(
        id=effect.id,
        effect=effect,
        consumer=ConsumerName("sync"),
        stream=StreamName("workspace-w"),
        epoch=1,
        attempts=0,
        crashes=0,
        correlation=UUID(int=1),
        traceparent=None,
    )
    ports = bench(tmp_path, repositories=repositories, user=FakeUserCode()).ports
    return await perform_once(consumer.CONSUMER, claimed, ports)


async def test_a_server_that_answers_503_is_waited_for(
    server: GitServer, repositories: GitRepositories, tmp_path: Path
) -> None:
    server.status = 503
    pauses = []
    for _ in range(8):  # more often than a counted attempt would live
        waits = await performed(server, repositories, tmp_path)
        assert waits.outcome is None
        assert not waits.counted
        assert waits.error is not None
        assert "503" in waits.error
        assert "does not answer now" in waits.error
        pauses.append(waits.retry_in_s)
    assert 0 < pauses[0] <= mirrors.PAUSE_S < min(pauses[3:])
    assert max(pauses) <= mirrors.LONGEST_PAUSE_S
    server.status = 200
    done = await performed(server, repositories, tmp_path)
    assert isinstance(done.outcome, CommitFetched)
    assert done.outcome.commit == head(server)


async def test_twin_a_503_that_counts_as_the_users_failure_ends_the_work(
    server: GitServer,
    repositories: GitRepositories,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        mirrors, "error_for", lambda error, what, is_here: NotFound(f"{what}: {error.stderr}")
    )
    server.status = 503
    ended = await performed(server, repositories, tmp_path)
    assert isinstance(ended.outcome, Failed)


async def test_a_branch_that_is_not_there_is_final(
    server: GitServer, repositories: GitRepositories, tmp_path: Path
) -> None:
    for which in ({"branch": "nowhere"}, {"sha": "0" * 40}):
        ended = await performed(server, repositories, tmp_path, **which)
        assert isinstance(ended.outcome, Failed)
        assert "push it" in ended.outcome.message


@pytest.mark.parametrize(
    ("status", "says"), [(401, "needs a login"), (403, "login"), (404, "not there")]
)
async def test_a_login_or_an_address_that_is_refused_is_final(
    server: GitServer, repositories: GitRepositories, status: int, says: str
) -> None:
    server.status = status
    with pytest.raises(NotFound, match=says):
        await repositories.fetch("w", commit(server))


@pytest.mark.parametrize("status", [429, 500, 502, 504])
async def test_a_server_in_trouble_is_an_absence(
    server: GitServer, repositories: GitRepositories, status: int
) -> None:
    server.status = status
    with pytest.raises(RepositoryAway, match=str(status)):
        await repositories.check(server.url("source/.git"))


async def test_a_connection_that_is_refused_is_an_absence(
    server: GitServer, repositories: GitRepositories
) -> None:
    wanted, port = commit(server), server.port
    server.stop()
    with pytest.raises(RepositoryAway, match=r"Failed to connect|Connection refused"):
        await repositories.fetch("w", wanted)
    with git_server(server.root, port=port):
        assert await repositories.fetch("w", wanted) == head(server)
    server.start = server.stop = lambda: None  # type: ignore[method-assign]  # it has ended


def fetching() -> list[int]:
    """The process ids of our own git processes that fetch."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            command = (status.parent / "cmdline").read_bytes().split(b"\0")
        except (OSError, ProcessLookupError):
            continue
        if parent == os.getpid() and command[0] == b"git" and b"fetch" in command:
            found.append(int(status.parent.name))
    return found


async def test_a_git_process_that_is_killed_is_an_absence(
    server: GitServer, repositories: GitRepositories
) -> None:
    for _ in range(2):
        server.held, server.transferring = threading.Event(), threading.Event()
        attempt = asyncio.create_task(repositories.fetch("w", commit(server, branch="main")))
        assert await asyncio.to_thread(server.transferring.wait, 60)
        pids = fetching()
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        server.held.set()
        with pytest.raises(RepositoryAway, match="signal 9"):
            await attempt
    server.held = None
    assert await repositories.fetch("w", commit(server)) == head(server)


async def test_a_full_disk_and_a_machine_without_processes_are_absences(
    server: GitServer, repositories: GitRepositories, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fails)
    with pytest.raises(RepositoryAway, match="No space left"):
        await repositories.fetch("w", commit(server))


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (-9, ""),
        (-15, "fatal: early EOF"),
        (128, "fatal: unable to access 'https://x/': Could not resolve host: x"),
        (128, "fatal: unable to access 'https://x/': The requested URL returned error: 502"),
        (128, "remote: Repository not found.\nfatal: The requested URL returned error: 503"),
        (128, "fatal: unable to access 'https://x/': gnutls_handshake() failed: internal error"),
        (
            128,
            "ssh: connect to host x port 22: Connection refused\nfatal: Could not read from remote",
        ),
        (128, "error: git-remote-https died of signal 9"),
        (128, "fatal: write error: No space left on device"),
        (128, "fatal: cannot fork: Resource temporarily unavailable"),
        (128, "fatal: something that nobody has seen before"),
        (127, "sh: 1: exec: git: not found"),
        (1, ""),
    ],
)
def test_a_failure_beside_the_repository_is_an_absence(status: int, said: str) -> None:
    assert isinstance(error_for(GitFailed(status, said), what="https://x"), RepositoryAway)


def test_a_deadline_that_passes_is_an_absence() -> None:
    assert isinstance(error_for(GitTimeout(1.0), what="https://x"), RepositoryAway)


@pytest.mark.parametrize(
    "said",
    [
        "fatal: '/x' does not appear to be a git repository",
        "remote: Not Found\nfatal: repository 'https://x/' not found",
        "fatal: could not read Username for 'https://x': terminal prompts disabled",
        "git@x: Permission denied (publickey).\nfatal: Could not read from remote repository.",
        "fatal: couldn't find remote ref refs/heads/nope",
        "fatal: remote error: upload-pack: not our ref 0123",
        "error: object 1: badTree: cannot be parsed as a tree\nfatal: fsck error in packed object",
    ],
)
def test_a_statement_of_git_about_the_repository_is_final(said: str) -> None:
    assert isinstance(error_for(GitFailed(128, said), what="https://x"), NotFound)


def test_a_limit_that_a_repository_passes_is_final_and_a_crash_counts() -> None:
    for limit in (signal.SIGXCPU, signal.SIGXFSZ):
        assert type(error_for(GitFailed(-limit, ""), what="x")) is Refused
        said = f"error: index-pack died of signal {int(limit)}\nfatal: fetch-pack: invalid output"
        assert type(error_for(GitFailed(128, said), what="x")) is Refused
    assert type(error_for(GitFailed(-signal.SIGSEGV, ""), what="x")) is TransientError


@pytest.mark.parametrize(
    "said",
    [
        "error: bad pack header\nfatal: unpack-objects failed",
        "remote: aborting due to possible repository corruption on the remote side.",
        "fatal: expected flush after ref listing",
        "fatal: expected 'packfile', received 'shallow-info'",
    ],
)
def test_a_transfer_that_no_git_can_read_counts_as_a_failed_attempt(said: str) -> None:
    """Such a repository was tried again without end, so its commit was never answered."""
    assert type(error_for(GitFailed(128, said), what="https://x")) is TransientError


UNKNOWN = "fatal: bad config line 4 in file ./config\nfatal: Could not read from remote repository."


def test_an_unknown_failure_of_a_directory_counts_as_a_failed_attempt() -> None:
    """There is no server that could be away, so the same command fails again."""
    told = error_for(GitFailed(128, UNKNOWN), what="/srv/x", is_here=True)
    assert type(told) is TransientError
    assert "bad config line 4" in str(told), "the message that says why"
    assert isinstance(error_for(GitFailed(128, UNKNOWN), what="https://x"), RepositoryAway)


def test_a_mirror_that_is_not_a_repository_is_fetched_again() -> None:
    """Git quotes its path, and does not quote the path in a file `.git`, which is final."""
    mirror, named = (f"fatal: not a git repository: {path}" for path in ("'/m/x.git'", "/x/.git"))
    assert type(error_for(GitFailed(128, mirror), what="m", is_here=True)) is TransientError
    assert type(error_for(GitFailed(128, named), what="/x", is_here=True)) is NotFound


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (-9, ""),
        (1, "bwrap: Creating new namespace failed"),
        (127, "sh: 1: exec: git: not found"),
        (128, "fatal: write error: No space left on device"),
        (128, "error: unable to read x: Input/output error"),
    ],
)
def test_a_failure_of_this_machine_is_an_absence(status: int, said: str) -> None:
    told = error_for(GitFailed(status, said), what="/srv/x", is_here=True)
    assert isinstance(told, RepositoryAway)
