"""Repositories that vanish, come back, or hold bad things: nothing crashes, each gets a clear message,
and later pushes still train."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.platform import Platform, eventually, git, platform
from tests.kit.pushed_workspace import (
    CONFIG,
    TRIGGER,
    PushedWorkspace,
    commit,
    make_bare,
    make_clone,
    toml_of,
)

pytestmark = [
    pytest.mark.kills,
    pytest.mark.processes,
    pytest.mark.postgres,
    pytest.mark.torch,
    pytest.mark.slow,
]

SHORT = toml_of(training={"rollout_batch_size": 1}, advanced={"max_steps": 1})
MOST_S = 60


@dataclass
class Team:
    root: Path
    clone: Path
    bare: Path
    workspace: PushedWorkspace

    def push(self, files: dict[str, str] | None = None, *, message: str = "a change") -> str:
        """Commit, push, and have the platform look. Returns the commit."""
        sha = commit(self.clone, files, message=message)
        self.send("main")
        return sha

    def send(self, *refspecs: str) -> None:
        git(self.clone, "push", "-q", "--force", "origin", *refspecs)
        self.workspace.look()

    def trains(self, sha: str) -> None:
        run = self.workspace.wait_for_run(sha)["run"]
        self.workspace.platform.wait(run, "finished")

    def refs_error(self) -> str:
        """What the workspace says of its refs, once they cannot be listed."""

        def look() -> str | None:
            error = self.workspace.info()["refs_error"]
            return str(error) if error else None

        return eventually(look, within_s=MOST_S, what="an error of the refs", every_s=0.1)

    def is_listed(self) -> None:
        """Wait until the refs are listed without an error."""
        eventually(
            lambda: True if not self.workspace.info()["refs_error"] else None,
            within_s=MOST_S,
            what="the refs are listed again",
            every_s=0.1,
        )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    home = tmp_path_factory.mktemp("bad") / "home"
    with platform(home, environment={"HEADRACE_POLL_S": "0"}) as started:
        started.upload("numbers")
        yield started


@pytest.fixture
def team(running: Platform, tmp_path: Path) -> Team:
    clone = make_clone(tmp_path / "clone", {CONFIG: SHORT})
    bare = make_bare(clone, tmp_path / f"{tmp_path.name[:40].replace('_', '-')}.git")
    name = tmp_path.name[-40:].replace("_", "-").strip("-")
    connected = PushedWorkspace.connect(running, str(bare), name=f"b-{name}", forge="none")
    return Team(tmp_path, clone, bare, connected)


def test_a_repository_that_is_renamed_says_so_and_trains_when_it_is_back(team: Team) -> None:
    away = team.root / "renamed.git"
    team.bare.rename(away)
    team.workspace.look()
    assert team.bare.name in team.refs_error()
    away.rename(team.bare)
    team.workspace.look()
    team.is_listed()
    assert not team.workspace.entries()
    team.trains(team.push())


def test_a_repository_that_comes_back_empty_and_then_whole_starts_nothing(team: Team) -> None:
    away = team.root / "away.git"
    team.bare.rename(away)
    git(team.root, "init", "-q", "--bare", str(team.bare))
    team.workspace.look()
    sha = git(team.clone, "rev-parse", "HEAD")
    eventually(
        lambda: next((e for e in team.workspace.entries() if e["after"] is None), None),
        within_s=MOST_S,
        what="the branch vanished",
        every_s=0.1,
    )
    team.bare.rename(team.root / "empty.git")
    away.rename(team.bare)
    team.workspace.look()
    team.trains(team.push())
    assert not team.workspace.runs_of(sha)


def test_a_force_push_back_to_an_old_commit_is_a_push(team: Team) -> None:
    old = git(team.clone, "rev-parse", "HEAD")
    team.trains(team.push())
    git(team.clone, "reset", "-q", "--hard", old)
    team.send("main")
    team.trains(old)


def test_a_branch_named_like_a_tag_and_a_ref_named_like_an_option(team: Team) -> None:
    git(team.clone, "branch", "v1")
    git(team.clone, "tag", "v1")
    git(team.clone, "tag", "main")
    odd = "refs/heads/--upload-pack=touch${IFS}pwned"
    sha = commit(team.clone, {"headrace.toml": TRIGGER.replace("main", "**")})
    names = ("refs/tags/main", "refs/tags/v1", "refs/heads/v1")
    team.send(*names, f"{sha}:{odd}", f"{sha}:refs/heads/main")
    team.trains(sha)
    # A branch whose name begins with a dash is not followed.
    assert {entry["ref"] for entry in team.workspace.entries()} == {*names, "refs/heads/main"}
    assert not list(team.root.rglob("pwned"))
    assert not list(team.workspace.platform.home.rglob("pwned"))


def test_a_push_of_3000_commits_is_one_push(team: Team) -> None:
    stream = [b"reset refs/heads/main\nfrom refs/heads/main^0\n"]
    for number in range(3000):
        text = f"commit {number}".encode()
        head = b"commit refs/heads/main\ncommitter t <t@example.org> %d +0000\n" % (10**9 + number)
        stream.append(head + b"data %d\n%s\n" % (len(text), text))
    team.clone.joinpath("stream").write_bytes(b"".join(stream))
    git(team.clone, "checkout", "-q", "--detach")
    with team.clone.joinpath("stream").open("rb") as commits:
        import_commits(team.clone, commits.read())
    git(team.clone, "checkout", "-q", "main")
    team.clone.joinpath("stream").unlink()
    sha = git(team.clone, "rev-parse", "HEAD")
    team.send("main")
    team.trains(sha)
    assert len(team.workspace.entries()) == 1


def import_commits(clone: Path, stream: bytes) -> None:
    subprocess.run(
        ["git", "fast-import", "--quiet"], cwd=clone, input=stream, check=True, capture_output=True
    )


MANY = f'[[trigger]]\nconfig = "{CONFIG}"\n' * 101
OUTSIDE = {
    "a parent": TRIGGER.replace(CONFIG, "../../etc/x.toml"),
    "an absolute path": TRIGGER.replace(CONFIG, "/etc/x.toml"),
}


def test_a_bad_headrace_toml_says_what_is_wrong_and_the_next_one_trains(team: Team) -> None:
    cases = {
        "has 10485760 bytes": "#" * 10_485_760,
        "bytes, more than 65536": f'[[trigger]]\nconfig = "{CONFIG}"\n' * 10_000,
        "at most 100": MANY,
        "must be a path inside of the repository": OUTSIDE["a parent"],
        "is not valid TOML": "[[trigger",
    }
    for message, text in cases.items():
        sha = team.push({"headrace.toml": text})
        team.workspace.wait_for_result(sha, "no run", within_s=MOST_S)
        assert message in (error := team.workspace.info()["push_error"] or ""), error[:300]
    absolute = team.push({"headrace.toml": OUTSIDE["an absolute path"]})
    team.workspace.wait_for_result(absolute, "inside of the repository", within_s=MOST_S)
    linked = team.clone / CONFIG
    linked.unlink()
    linked.symlink_to("/etc/passwd")
    sha = team.push({"headrace.toml": TRIGGER})
    team.workspace.wait_for_result(sha, "is a symbolic link", within_s=MOST_S)
    assert all(run["outcome"] == "refused" for run in team.workspace.runs_of(sha))
    assert "is a symbolic link" in (team.workspace.info()["push_error"] or "")
    linked.unlink()
    mended = team.push({CONFIG: SHORT})
    team.trains(mended)
    assert team.workspace.info()["push_error"] is None


def test_a_deleted_repository_says_so(team: Team) -> None:
    shutil.rmtree(team.bare)
    team.workspace.look()
    assert team.bare.name in team.refs_error()
    assert team.workspace.platform.get("/workspaces", limit=50)["workspaces"]
