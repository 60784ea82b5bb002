"""A push to a local repository starts runs, on real processes: each kind of trigger once."""

from collections.abc import Iterator

import pytest

from tests.kit.pushed_workspace import toml_of
from tests.kit.team import Team, team_of

pytestmark = [pytest.mark.processes, pytest.mark.postgres, pytest.mark.torch]

SHORT = {"training": {"rollout_batch_size": 1}, "advanced": {"max_steps": 1}}
ENDLESS = {"advanced": {"max_steps": 100_000}}

TRIGGERS = """
[[trigger]]
branches = ["main", "!other"]
config = "configs/training/short.toml"
name = "{workspace}-{branch}-{number}"
set = { "training.lr" = 0.005 }

[[trigger]]
branches = ["paths"]
paths = ["data/**", "!data/*.md"]
config = "configs/training/short.toml"

[[trigger]]
tags = ["v*"]
config = "configs/training/short.toml"

[[trigger]]
branches = ["queue"]
config = "configs/training/endless.toml"

[[trigger]]
branches = ["cancel"]
config = "configs/training/endless.toml"
concurrency = "cancel_previous"

[[trigger]]
branches = ["skip"]
config = "configs/training/endless.toml"
concurrency = "skip"

[[trigger]]
branches = ["approval"]
config = "configs/training/short.toml"
require_approval = true

[[trigger]]
branches = ["wrong"]
config = "configs/training/wrong.toml"
"""


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    files = {
        "headrace.toml": TRIGGERS,
        "configs/training/short.toml": toml_of(**SHORT),
        "configs/training/endless.toml": toml_of(**ENDLESS),
        "configs/training/wrong.toml": toml_of(experiment={"dataset": "nubmers"}),
    }
    with team_of(tmp_path_factory.mktemp("pushes"), files) as found:
        yield found


def test_a_push_starts_a_run_that_finishes(team: Team) -> None:
    sha = team.push("main", {"note": "one"})
    submitted = team.find("submitted", sha)
    info = team.platform.wait(submitted["run"], "finished")
    assert info["run"]["name"] == submitted["run_name"] == "math-main-2"  # 1 is the first look
    assert info["run"]["commit_sha"] == sha
    assert info["run"]["config"]["training"]["lr"] == 0.005
    team.find("settled", sha)
    team.look()
    runs = team.platform.get("/runs", limit=50)["runs"]
    assert len([run for run in runs if run["name"].startswith("math-main")]) == 1


def test_only_changed_paths_start_a_run(team: Team) -> None:
    first = team.push("paths", {"data/a.jsonl": "{}"})
    assert team.find("push-examined", first)["matches"]
    assert team.find("push-examined", team.push("paths", {"data/a.md": "x"}))["matches"] == []
    assert team.find("push-examined", team.push("paths", {"src/b": "x"}))["matches"] == []
    again = team.push("paths", {"data/b.jsonl": "{}"})
    team.platform.wait(team.find("submitted", again)["run"], "finished")


def test_a_tag_starts_a_run_and_another_tag_does_not(team: Team) -> None:
    sha = team.push("refs/tags/v1", {"tagged": "1"})
    team.platform.wait(team.find("submitted", sha)["run"], "finished")
    other = team.push("refs/tags/other", {"tagged": "2"})
    assert team.find("push-examined", other)["reason"] == "no trigger matches"


def test_a_commit_can_ask_for_no_run(team: Team) -> None:
    sha = team.push("main", {"note": "two"}, message="a change [skip train]")
    examined = team.find("push-examined", sha)
    assert examined["matches"] == []
    assert "[skip train]" in examined["reason"]


def test_a_second_push_waits_for_the_run_of_the_first(team: Team) -> None:
    first = team.find("submitted", team.push("queue", {"q": "1"}))["run"]
    second = team.push("queue", {"q": "2"})
    queued = team.find("queued", second)
    assert queued["behind"] == first
    team.platform.wait(first, "running")
    team.platform.post(f"/runs/{first}/stop", {})
    team.platform.wait(first, "stopped")
    following = team.find("submitted", second)["run"]
    assert following == queued["run"]
    team.platform.post(f"/runs/{following}/stop", {})
    team.platform.wait(following, "stopped")


def test_a_second_push_stops_the_run_of_the_first(team: Team) -> None:
    first = team.find("submitted", team.push("cancel", {"c": "1"}))["run"]
    second = team.push("cancel", {"c": "2"})
    following = team.find("submitted", second)["run"]
    assert team.find("fired", second)["supersedes"] == [first]
    team.platform.wait(first, "stopped")
    team.platform.post(f"/runs/{following}/stop", {})
    team.platform.wait(following, "stopped")


def test_a_second_push_makes_no_run_while_the_first_is_in_progress(team: Team) -> None:
    first = team.find("submitted", team.push("skip", {"s": "1"}))["run"]
    skipped = team.find("skipped", team.push("skip", {"s": "2"}))
    assert first in skipped["reason"]
    team.platform.post(f"/runs/{first}/stop", {})
    team.platform.wait(first, "stopped")


def test_a_run_waits_until_it_is_approved(team: Team) -> None:
    run = team.find("submitted", team.push("approval", {"a": "1"}))["run"]
    info = team.platform.info(run)["run"]
    assert (info["status"], info["phase"]) == ("pending", "approval")
    assert not [e for e in team.platform.events(run) if e["type"] == "rl.run.started"]
    for _ in range(2):
        answer = team.platform.post(f"/runs/{run}/approve", {})
        assert answer.status_code == 200, answer.text
    team.platform.wait(run, "finished")
    assert len([e for e in team.platform.events(run) if e["type"] == "rl.run.approved"]) == 1


def test_a_run_that_waits_for_approval_can_be_stopped(team: Team) -> None:
    run = team.find("submitted", team.push("approval", {"a": "2"}))["run"]
    team.platform.post(f"/runs/{run}/stop", {})
    team.platform.wait(run, "stopped")
    answer = team.platform.post(f"/runs/{run}/approve", {})
    assert answer.status_code == 409, answer.text
    assert "is stopped" in answer.json()["detail"]


def test_a_wrong_config_is_refused_with_a_suggestion(team: Team) -> None:
    refused = team.find("refused", team.push("wrong", {"w": "1"}))
    assert "nubmers" in refused["message"]
    assert "did you mean numbers" in refused["message"]


def test_a_wrong_trigger_file_says_what_is_wrong(team: Team) -> None:
    wrong = '[[trigger]]\nconfig = "a.toml"\nbranchs = ["main"]\n'
    examined = team.find("push-examined", team.push("broken", {"headrace.toml": wrong}))
    assert "did you mean branches" in examined["error"]
