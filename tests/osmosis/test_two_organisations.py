"""Two organisations with equal names of everything, beside each other: each command of one finds what is
its own, and the ids of the other are absent."""

import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.kit.platform import eventually, platform
from tests.osmosis import workspace
from tests.osmosis.team import Team, join

pytestmark = [
    pytest.mark.osmosis,
    pytest.mark.processes,
    pytest.mark.postgres,
    pytest.mark.torch,
    pytest.mark.slow,
]

RUN, MODEL = "same-name", "same-name-step-4"


@pytest.fixture(scope="module")
def teams(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Team, Team]]:
    """The people of two organisations, each with a workspace `sums` of the repository acme/sums, a
    dataset `numbers` of its own content, and a finished run of the same name."""
    root = tmp_path_factory.mktemp("two")
    with platform(root / "home") as started:
        both = (
            join(started, program, root, organisation="north"),
            join(started, program, root, organisation="south"),
        )
        for team, rows in zip(both, (workspace.ROWS, workspace.ROWS[:4]), strict=True):
            team.upload("numbers", workspace.rows_of(rows))
        runs = [run_of(team) for team in both]
        for run in runs:
            started.wait(run, "finished")
        yield both


def run_of(team: Team) -> str:
    """Start a run with a name. The client itself cannot choose one."""
    config = tomllib.loads(workspace.TRAINING)
    config["advanced"]["max_steps"] = 4
    with team.api("member") as api:
        answer = api.post("/runs", json={"config": config, "name": RUN})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["run"]["id"])


def deployment_of(team: Team) -> Any:
    """The only deployment that a viewer sees, as the native API shows it."""
    with team.api("viewer") as api:
        [deployment] = api.get("/deployments").json()["deployments"]
    return deployment


def is_counted(team: Team) -> bool | None:
    """Whether one request to the deployment is counted."""
    return deployment_of(team)["usage"]["requests"] == 1 or None


def data_of(team: Team, *command: str) -> Any:
    return team.viewer.run(*command)["data"]


def test_equal_names_are_different_things(teams: tuple[Team, Team]) -> None:
    shown = [data_of(team, "auth", "whoami")["workspace"] for team in teams]
    assert [one["name"] for one in shown] == ["sums", "sums"]
    assert shown[0]["id"] != shown[1]["id"]
    runs = [data_of(team, "train", "info", RUN)["training_run"] for team in teams]
    assert [run["name"] for run in runs] == [RUN, RUN]
    assert runs[0]["id"] != runs[1]["id"]


def test_lists_have_only_what_is_their_own(teams: tuple[Team, Team]) -> None:
    for team in teams:
        [run] = team.viewer.run("train", "list", "--all")["items"]
        assert run["id"] == data_of(team, "train", "info", RUN)["training_run"]["id"]
        models = team.viewer.run("model", "list", "--type", "lora")["items"]
        assert {one["id"].partition("@")[0] for one in models} == {run["id"]}


def test_the_id_of_another_organisation_is_absent(teams: tuple[Team, Team]) -> None:
    """As absent as one that nobody has."""
    north, south = teams
    theirs = data_of(south, "train", "info", RUN)["training_run"]["id"]
    for group, command in (("train", "info"), ("train", "logs"), ("model", "info")):
        name = f"{theirs}-step-4" if group == "model" else theirs
        refused = north.owner.refused(group, command, name)
        unknown = north.owner.refused(group, command, name.replace(theirs, "0" * 16))
        assert refused.code == unknown.code == "NOT_FOUND"
        assert refused.message.replace(theirs, "0" * 16) == unknown.message
    assert north.owner.refused("train", "stop", theirs, "--yes").code == "NOT_FOUND"


def test_models_of_one_name_are_deployed_and_asked(teams: tuple[Team, Team]) -> None:
    """The name for inference is the same, and each key reaches the model of its own workspace. The
    deployments have one name, too, and the use of each is that of its own workspace."""
    names = set()
    for team in teams:
        assert team.member.run("model", "deploy", MODEL)["resource"]["status"] == "active"
        deployment = deployment_of(team)
        assert (deployment["name"], deployment["workspace"]) == (MODEL, team.workspace)
        assert deployment["usage"]["requests"] == 0, "what the other used is not shown"
        found = data_of(team, "model", "info", MODEL)["lora_model"]
        names.add(found["inference_model"])
        listed = team.viewer.run("model", "list", "--type", "lora")
        assert listed["active_deployments"] == 1, "those of the other are not counted"
        assert team.ask(found["inference_model"])
        eventually(partial(is_counted, team), within_s=30, what="the request is counted")
    [name] = names
    assert all(team.ask(name) for team in teams)
    north, south = teams
    north.member.run("model", "undeploy", MODEL)
    assert data_of(south, "model", "info", MODEL)["lora_model"]["deployment_status"] == "active"
    assert south.ask(name)
