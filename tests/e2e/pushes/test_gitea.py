"""A real forge: a user's `git push` to Gitea trains, and the commit there shows what became of it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.gitea import Gitea, GiteaRepository
from tests.kit.platform import MAIN, Platform, eventually, git, platform
from tests.kit.pushed_workspace import CONFIG, TRIGGER, PushedWorkspace, commit, make_clone, toml_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.postgres,
    pytest.mark.torch,
    pytest.mark.gitea,
    pytest.mark.slow,
]

BROKEN = MAIN.replace("digits = sum(", "raise ValueError('no digits here')\n            sum(")
NO_POLLS = {"HEADRACE_POLL_S": "0"}
"""So that only a webhook can tell of a push."""


@dataclass
class Team:
    """A private repository on Gitea that is connected to a platform, and its owner's clone."""

    repository: GiteaRepository
    clone: Path
    workspace: PushedWorkspace

    def push(self, files: dict[str, str] | None = None, *, message: str = "a change") -> str:
        """Commit and push; returns the commit."""
        sha = commit(self.clone, files, message=message)
        self.repository.push(self.clone, "main")
        return sha

    def ends(self, sha: str, *, within_s: float = 90) -> Any:
        """The status that the forge shows for the commit, once it is final. There is one context, and
        it got one final status."""

        def look() -> Any:
            shown = self.repository.status(sha)["statuses"] or []
            return shown[0] if shown and shown[0]["status"] != "pending" else None

        found = eventually(look, within_s=within_s, what=f"a final status of {sha}", every_s=0.2)
        every = self.repository.statuses(sha)
        assert {one["context"] for one in every} == {found["context"]}
        assert [one["status"] for one in every if one["status"] != "pending"] == [found["status"]]
        return found


@pytest.fixture(scope="module")
def running(gitea: Gitea, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    home = tmp_path_factory.mktemp("gitea") / "home"
    with platform(home, environment={**NO_POLLS, **gitea.environment}) as started:
        started.upload("numbers")
        yield started


def connect(running: Platform, repository: GiteaRepository) -> PushedWorkspace:
    """What a user types, with the token in a variable of the shell."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "producers.cli.main", "workspace", "connect", repository.url),
            *("--provider", "gitea", "--token-env", "FORGE_TOKEN", "--json"),
        ],
        env={**running.environment, "FORGE_TOKEN": repository.owner.token},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert repository.owner.token not in done.stdout + done.stderr
    shown = running.get("/workspaces", limit=50)["workspaces"]
    [found] = [one for one in shown if one["name"] == repository.name]
    return PushedWorkspace(running, found["id"], {})


@pytest.fixture(scope="module")
def team(gitea: Gitea, running: Platform, tmp_path_factory: pytest.TempPathFactory) -> Team:
    repository = gitea.create_repository(gitea.create_user(), private=True)
    clone = make_clone(tmp_path_factory.mktemp("clone"))
    repository.push(clone, "main")
    return Team(repository, clone, connect(running, repository))


def test_connecting_makes_a_hook_and_starts_nothing(team: Team) -> None:
    [hook] = team.repository.hooks()
    assert hook["active"]
    assert hook["config"]["url"].startswith(f"{team.workspace.platform.url}/webhooks/")
    assert not team.workspace.all_runs()


def test_a_push_ends_in_a_green_status(team: Team) -> None:
    sha = team.push()
    shown = team.ends(sha)
    assert shown["status"] == "success", shown
    run = team.workspace.wait_for_run(sha)
    assert team.workspace.platform.info(run["run"])["run"]["status"] == "finished"
    assert shown["target_url"].endswith(f"/runs/{run['run_name']}"), shown
    assert team.repository.status(sha)["state"] == "success"
    [entry] = [entry for entry in team.workspace.entries() if entry["after"] == sha]
    assert (entry["event"], entry["provider"]) == ("push", "gitea")
    assert entry["pusher"] == team.repository.owner.name


def test_a_run_that_fails_turns_the_commit_red_with_the_first_line(team: Team) -> None:
    sha = team.push({"rollouts/say/main.py": BROKEN})
    shown = team.ends(sha)
    assert shown["status"] in ("failure", "error"), shown
    run = team.workspace.wait_for_run(sha)
    error = team.workspace.platform.info(run["run"])["run"]["error"]
    assert shown["description"][:40] in error
    team.push({"rollouts/say/main.py": MAIN}, message="mended [skip train]")


def test_a_config_that_is_not_valid_turns_the_commit_red(team: Team) -> None:
    sha = team.push({CONFIG: toml_of(training={"lr": -1.0})})
    shown = team.ends(sha)
    assert shown["status"] in ("failure", "error"), shown
    assert "lr" in shown["description"], shown
    team.push({CONFIG: toml_of(advanced={"max_steps": 2})}, message="mended [skip train]")


def test_a_mistake_in_headrace_toml_is_shown_on_the_commit_and_the_workspace(team: Team) -> None:
    sha = team.push({"headrace.toml": TRIGGER.replace("branches", "branchs")})
    shown = team.ends(sha)
    assert shown["status"] in ("failure", "error"), shown
    assert "branchs" in shown["description"], shown
    assert "branches" in team.workspace.info()["push_error"]
    mended = team.push({"headrace.toml": TRIGGER})
    assert team.ends(mended)["status"] == "success"
    assert team.workspace.info()["push_error"] is None


def test_a_forge_that_is_away_holds_up_nothing_and_gets_its_status_later(
    gitea: Gitea, team: Team
) -> None:
    server = gitea.server
    if server is None:
        pytest.skip("somebody else runs this Gitea")
    sha = team.push({CONFIG: toml_of(advanced={"max_steps": 12})})
    run = team.workspace.wait_for_run(sha)["run"]
    server.stop()
    try:
        team.workspace.platform.wait(run, "finished")
    finally:
        server.start()
    assert team.ends(sha)["status"] == "success"


def test_disconnecting_removes_the_hook(team: Team) -> None:
    answer = team.workspace.platform.api.delete(f"/workspaces/{team.workspace.id}/connection")
    assert answer.status_code in (200, 204), answer.text
    assert not team.repository.hooks()
    before = team.workspace.all_runs()
    team.push()
    team.workspace.look()
    assert team.workspace.all_runs() == before


def test_no_secret_of_the_forge_is_in_the_home(running: Platform, team: Team) -> None:
    """Logs, mirrors and the environment of processes hold no token."""
    token = team.repository.owner.token.encode()
    for path in running.home.rglob("*"):
        if path.is_file() and os.access(path, os.R_OK):
            assert token not in path.read_bytes(), path
    assert token.decode() not in git(team.clone, "config", "--list")
