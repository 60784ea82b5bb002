"""The unmodified command line walks through everything that its users do, against a real platform."""

import tomllib
from collections.abc import Callable
from typing import Any

import pytest

from tests.kit.platform import eventually, final_adapter
from tests.osmosis import workspace
from tests.osmosis.client import Osmosis
from tests.osmosis.team import Team

pytestmark = [
    pytest.mark.osmosis,
    pytest.mark.processes,
    pytest.mark.postgres,
    pytest.mark.torch,
    pytest.mark.slow,
]

TRAINING, EVALUATION = "configs/training/sums.toml", "configs/eval/sums.toml"
ENDED = ("finished", "failed", "stopped")


def wait(
    osmosis: Osmosis, group: str, name: str, is_met: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """What `train info` or `eval info` shows, once it meets a condition."""

    def look() -> dict[str, Any] | None:
        found: dict[str, Any] = osmosis.run(group, "info", name)["data"]
        return found if is_met(found) else None

    return eventually(look, within_s=60, what=f"{group} {name}", every_s=0.3)


def train(team: Team) -> str:
    """Submit a run as a member. Returns its name."""
    submitted = team.member.run("train", "submit", TRAINING, "--yes")
    assert submitted["resource"]["status"] == "pending"
    return str(submitted["resource"]["name"])


@pytest.fixture(scope="module")
def trained(team: Team) -> str:
    """A run that has finished; its name."""
    team.member.run("dataset", "upload", "data/numbers.jsonl", "--yes")
    name = train(team)
    found = wait(team.member, "train", name, lambda one: one["training_run"]["status"] in ENDED)
    assert found["training_run"]["status"] == "finished", found
    return name


def test_the_owner_of_an_api_key_signs_in_and_out(team: Team) -> None:
    """A key that is stored and one in the environment say the same. To log out revokes the key."""
    api_key = team.platform.post(
        "/api-keys", {"name": "short", "scopes": ["read"], "workspace": team.workspace}
    ).json()["secret"]
    home = team.directory.parent / "stored"
    home.mkdir()
    stored = Osmosis(team.owner.program, team.platform.url, home, team.directory)
    assert stored.refused("train", "list").code == "AUTH_REQUIRED"
    stored.run("auth", "login", "--token", api_key)
    shown = stored.run("auth", "whoami")["data"]
    assert shown["workspace"]["id"] == team.workspace
    assert shown["workspace"]["role"] == "viewer"
    assert [
        team.clients[role].run("auth", "whoami")["data"]["workspace"]["role"]
        for role in ("owner", "member", "viewer")
    ] == ["owner", "member", "viewer"]
    stored.run("train", "list")
    stored.run("auth", "logout", "--yes")
    assert stored.refused("train", "list").code == "AUTH_REQUIRED"
    used = Osmosis(team.owner.program, team.platform.url, home, team.directory, api_key)
    assert used.refused("train", "list").code == "AUTH_REQUIRED", "the key itself is revoked"


def test_a_run_is_followed_to_its_end(team: Team, trained: str) -> None:
    """Everybody sees it, and its curves, checkpoints and log."""
    for osmosis in team.clients.values():
        [listed] = [one for one in osmosis.run("train", "list")["items"] if one["name"] == trained]
        assert (listed["status"], listed["current_step"]) == ("finished", 4)
        assert listed["creator_name"] == "member"
    found = team.viewer.run("train", "info", trained)["data"]
    assert found["metrics_available"]
    assert [one["checkpoint_step"] for one in found["checkpoints"]] == [2, 4]
    first = team.viewer.run("train", "logs", trained, "--limit", "3")
    assert len(first["items"]) == 3
    assert first["next_cursor"]
    older = team.viewer.run(
        "train", "logs", trained, "--limit", "3", "--cursor", first["next_cursor"]
    )
    assert older["items"][-1]["timestamp"] <= first["items"][0]["timestamp"]


def test_the_same_toml_gives_the_same_weights(team: Team, trained: str) -> None:
    """`osmosis train submit` and `headrace train submit` start the same run."""
    started = team.platform
    config = tomllib.loads(workspace.TRAINING)
    again = started.wait(started.submit(config, workspace=team.workspace), "finished")
    assert final_adapter(again) == final_adapter(started.info(trained))
    config["advanced"]["seed"] = 8
    twin = started.wait(started.submit(config, workspace=team.workspace), "finished")
    assert final_adapter(twin) != final_adapter(again), "the twin: another seed"


def test_the_rollouts_of_the_repository_are_listed(team: Team, trained: str) -> None:
    [listed] = team.viewer.run("rollout", "list")["items"]
    assert listed["name"] == workspace.ROLLOUT


def test_a_run_is_stopped(team: Team, trained: str) -> None:
    name = train(team)
    team.member.run("train", "stop", name, "--yes")
    found = wait(team.member, "train", name, lambda one: one["training_run"]["status"] in ENDED)
    assert found["training_run"]["status"] == "stopped"
    team.member.run("train", "stop", name, "--yes")


@pytest.fixture(scope="module")
def model(team: Team, trained: str) -> str:
    """The last checkpoint, deployed; its name."""
    name = f"{trained}-step-4"
    assert name in [one["model_name"] for one in lora_models(team.viewer)]
    assert team.member.run("model", "deploy", name)["resource"]["status"] == "active"
    return name


def lora_models(osmosis: Osmosis) -> list[dict[str, Any]]:
    return list(osmosis.run("model", "list", "--type", "lora")["items"])


def test_a_deployed_model_answers(team: Team, model: str) -> None:
    found = team.viewer.run("model", "info", model)["data"]["lora_model"]
    assert found["deployment_status"] == "active"
    assert found["deployed_by"] == "member"
    listed = team.viewer.run("model", "list", "--type", "lora")
    assert (listed["active_deployments"], listed["max_active_deployments"]) == (1, 5)
    assert team.ask(found["inference_model"])


def test_a_deployed_model_is_evaluated_stopped_and_repeated(team: Team, model: str) -> None:
    """An evaluation that is stopped has attempts that were not made, which a retry makes."""
    member = team.member
    named = member.run("model", "info", model)["data"]["lora_model"]["inference_model"]
    (team.directory / EVALUATION).write_text(workspace.EVALUATION.replace("MODEL", named))
    workspace.push(team.directory, "an evaluation")
    name = member.run("eval", "submit", EVALUATION, "--yes")["resource"]["name"]
    wait(member, "eval", name, lambda one: one["results"]["graded"] > 0)
    member.run("eval", "stop", name, "--yes")
    found = wait(member, "eval", name, lambda one: one["eval_run"]["status"] in ENDED)
    assert found["eval_run"]["status"] == "stopped"
    missing = found["results"]["skipped"]
    assert missing > 0
    repeated = member.run("eval", "retry", name, "--yes")["resource"]
    assert repeated["retryable_samples"] == missing
    found = wait(member, "eval", name, lambda one: one["eval_run"]["status"] == "finished")
    results = found["results"]
    assert (results["graded"], results["skipped"], results["total_runs"]) == (16, 0, 16)
    assert sorted(results["reward_stats"]["pass_at_k"]) == ["1", "2"]
    assert results["total_tokens"] > 16 * 6
    assert name in [one["name"] for one in team.viewer.run("eval", "list")["items"]]
    assert team.viewer.run("eval", "logs", name)["items"]
    saved = team.directory.parent / "saved"
    done = team.viewer.run("eval", "download", name, "--type", "all", "-o", str(saved), "--yes")
    assert done["resource"]["files_failed"] == []
    assert done["resource"]["files_downloaded"] == 3 + 16, "figures, log, rows and attempts"
    assert len(list(saved.glob("trajectories/*/*.json"))) == 16
    again = team.viewer.run("eval", "download", name, "--type", "all", "-o", str(saved), "--yes")
    assert again["resource"]["files_skipped"] == 19, "the sizes are those of the list"


def test_a_model_is_undeployed(team: Team, model: str) -> None:
    """It comes after those that ask the model."""
    assert team.member.run("model", "undeploy", model)["resource"]["status"] == "inactive"
    [found] = [one for one in lora_models(team.viewer) if one["model_name"] == model]
    assert found["deployment_status"] == "inactive"


def test_base_models_are_listed_with_their_size(team: Team) -> None:
    listed = team.viewer.run("model", "list", "--type", "base")["items"]
    assert "scratch:qwen3-tiny" in [one["model_name"] for one in listed]
    found = team.viewer.run("model", "info", "scratch:qwen3-tiny")["data"]["base_model"]
    assert found["parameters"] > 0


def test_secrets_are_set_listed_and_deleted(team: Team) -> None:
    """The value is nowhere in what is shown."""
    with_value = Osmosis(
        team.owner.program,
        team.platform.url,
        team.owner.home,
        team.directory,
        team.owner.api_key,
        {"VALUE": "much-too-secret"},
    )
    with_value.run("secret", "set", "SUMS_KEY", "--scope", "workspace", "--env", "VALUE")
    listed = team.member.run("secret", "list", "--scope", "workspace")
    assert [one["name"] for one in listed["items"]] == ["SUMS_KEY"]
    assert "much-too-secret" not in str(listed)
    team.owner.run("secret", "delete", "SUMS_KEY", "--scope", "workspace", "--yes")
    assert team.member.run("secret", "list", "--scope", "workspace")["items"] == []


@pytest.mark.parametrize(
    "command",
    [
        ("train", "submit", TRAINING, "--yes"),
        ("train", "stop", "any", "--yes"),
        ("model", "deploy", "any-step-1"),
        ("eval", "stop", "any", "--yes"),
        ("secret", "set", "SUMS_KEY", "--scope", "workspace", "--env", "PATH"),
    ],
    ids=" ".join,
)
def test_a_viewer_changes_nothing(team: Team, trained: str, command: tuple[str, ...]) -> None:
    refused = team.viewer.refused(*command)
    assert "API key with the scope" in refused.message
    assert "subscription" not in refused.message.lower()


def test_a_wrong_key_of_a_config_is_named(team: Team, trained: str) -> None:
    wrong = team.directory / "configs/training/wrong.toml"
    wrong.write_text(workspace.TRAINING.replace("max_steps", "max_step").replace("1e-2", "9.0"))
    refused = team.member.refused("train", "submit", "configs/training/wrong.toml", "--yes")
    assert refused.code == "VALIDATION"
    assert "training.lr" in refused.message
    assert "did you mean 'advanced.max_steps'" in refused.message


def test_benchmarks_are_not_there(team: Team) -> None:
    assert team.viewer.refused("benchmark", "list").code == "NOT_FOUND"
