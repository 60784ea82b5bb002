"""kill -9 of the process that serves at every step of a deployment: one version is deployed, once, it
answers, and it is undeployed."""

from pathlib import Path

import httpx
import pytest

from infra.failpoints import CONSUMERS, runtime_points
from tests.kit.platform import Platform, eventually, make_workspace, platform, run_config

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

POINTS = runtime_points("deploy", CONSUMERS["deploy"])
CONFIG = run_config(
    checkpoints={"checkpoint_save_freq": 2, "eval_interval": 2},
    advanced={
        "max_steps": 2,
        "validation_dataset": "numbers",
        "deploy": "best",
        "deploy_name": "sums",
    },
)


def answers(running: Platform, model: str) -> bool | None:
    api_key = (running.home / "token").read_text().strip()
    answer = httpx.post(
        f"{running.url}/v1/chat/completions",
        json={"model": model, "messages": [{"role": "user", "content": "Say 3"}], "max_tokens": 2},
        headers={"Authorization": f"Bearer {api_key}"},
        timeout=60,
    )
    return answer.status_code == 200 or None


def test_a_deployment_survives_kills_at_each_of_its_steps(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "workspace")
    armed = ",".join(f"{point}:1" for point in POINTS)
    with platform(tmp_path / "home", environment={"HEADRACE_FAILPOINT": armed}) as running:
        assert running.post("/workspaces", {"url": str(workspace), "name": "w"}).status_code == 201
        running.upload("numbers")
        running.wait(running.submit(CONFIG, workspace="w"), "finished")

        def active() -> str | None:
            answer = running.api.get("/deployments/sums")
            found = answer.json().get("deployment", {}) if answer.status_code == 200 else {}
            return found["model"] if found.get("status") == "active" else None

        model = eventually(active, within_s=120, what="the checkpoint is deployed")
        eventually(lambda: answers(running, model), within_s=60, what="it answers")
        [row] = running.get("/deployments")["deployments"]
        assert row["version"] == 1, "it was deployed once"
        assert running.api.delete("/deployments/sums").status_code == 202

        def inactive() -> bool | None:
            [row] = running.get("/deployments")["deployments"]
            return row["status"] == "inactive" or None

        eventually(inactive, within_s=60, what="it is undeployed")
    fired = {path.name for path in (tmp_path / "home" / "failpoints").iterdir()}
    missed = {point for point in POINTS if not any(name.startswith(point) for name in fired)}
    assert not missed
