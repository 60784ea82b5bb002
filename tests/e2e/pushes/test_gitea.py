"""A real forge: a user's `git push` to Gitea trains, and the commit there shows what became of it."""

import os
from collections.abc import Iterator

import pytest

from tests.kit.gitea import Gitea
from tests.kit.gitea_team import GiteaTeam, gitea_team
from tests.kit.platform import MAIN, Platform, git, platform
from tests.kit.pushed_workspace import CONFIG, TRIGGER, toml_of

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


@pytest.fixture(scope="module")
def running(gitea: Gitea, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    home = tmp_path_factory.mktemp("gitea") / "home"
    with platform(home, environment={**NO_POLLS, **gitea.environment}) as started:
        started.upload("numbers")
        yield started


@pytest.fixture(scope="module")
def team(gitea: Gitea, running: Platform, tmp_path_factory: pytest.TempPathFactory) -> GiteaTeam:
    return gitea_team(gitea, running, tmp_path_factory.mktemp("clone"))


def test_connecting_makes_a_hook_and_starts_nothing(team: GiteaTeam) -> None:
    [hook] = team.repository.hooks()
    assert hook["active"]
    assert hook["config"]["url"].startswith(f"{team.workspace.platform.url}/webhooks/")
    assert not team.workspace.all_runs()


def test_a_push_ends_in_a_green_status(team: GiteaTeam) -> None:
    sha = team.push()
    shown = team.ends(sha)
    assert shown["status"] == "success", shown
    run = team.workspace.wait_for_run(sha)
    assert team.workspace.platform.info(run["run"])["run"]["status"] == "finished"
    assert shown["target_url"].endswith(f"/runs/{run['run_name']}"), shown
    assert team.repository.status(sha)["state"] == "success"
    [entry] = [entry for entry in team.workspace.entries() if entry["after"] == sha]
    assert (entry["event"], entry["forge"]) == ("push", "gitea")
    assert entry["pusher"] == team.repository.owner.name


def test_a_run_that_fails_turns_the_commit_red_with_the_first_line(team: GiteaTeam) -> None:
    sha = team.push({"rollouts/say/main.py": BROKEN})
    shown = team.ends(sha)
    assert shown["status"] in ("failure", "error"), shown
    run = team.workspace.wait_for_run(sha)
    error = team.workspace.platform.info(run["run"])["run"]["error"]
    assert shown["description"][:40] in error
    team.push({"rollouts/say/main.py": MAIN}, message="mended [skip train]")


def test_a_config_that_is_not_valid_turns_the_commit_red(team: GiteaTeam) -> None:
    sha = team.push({CONFIG: toml_of(training={"lr": -1.0})})
    shown = team.ends(sha)
    assert shown["status"] in ("failure", "error"), shown
    assert "lr" in shown["description"], shown
    team.push({CONFIG: toml_of(advanced={"max_steps": 2})}, message="mended [skip train]")


def test_a_mistake_in_headrace_toml_is_shown_on_the_commit_and_the_workspace(
    team: GiteaTeam,
) -> None:
    sha = team.push({"headrace.toml": TRIGGER.replace("branches", "branchs")})
    shown = team.ends(sha)
    assert shown["status"] in ("failure", "error"), shown
    assert "branchs" in shown["description"], shown
    assert "branches" in team.workspace.info()["push_error"]
    mended = team.push({"headrace.toml": TRIGGER})
    assert team.ends(mended)["status"] == "success"
    assert team.workspace.info()["push_error"] is None


def test_a_forge_that_is_away_holds_up_nothing_and_gets_its_status_later(
    gitea: Gitea, team: GiteaTeam
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


def test_disconnecting_removes_the_hook(team: GiteaTeam) -> None:
    answer = team.workspace.platform.api.delete(f"/workspaces/{team.workspace.id}/connection")
    assert answer.status_code in (200, 204), answer.text
    assert not team.repository.hooks()
    before = team.workspace.all_runs()
    team.push()
    team.workspace.look()
    assert team.workspace.all_runs() == before


def test_no_secret_of_the_forge_is_in_the_home(running: Platform, team: GiteaTeam) -> None:
    """Logs, mirrors and the environment of processes hold no token."""
    token = team.repository.owner.token.encode()
    for path in running.home.rglob("*"):
        if path.is_file() and os.access(path, os.R_OK):
            assert token not in path.read_bytes(), path
    assert token.decode() not in git(team.clone, "config", "--list")
