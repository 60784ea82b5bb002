"""kill -9 of the process that serves at every step of a deployment: one version is deployed, once, it
answers, and it is undeployed."""

from infra.failpoints import CONSUMERS, runtime_points
from tests.kit.kills import Stage, once
from tests.kit.platform import Platform, eventually, run_config

POINTS = once(*runtime_points("deploy", CONSUMERS["deploy"]))
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
    messages = [{"role": "user", "content": "Say 3"}]
    answer = running.api.post(
        f"{running.url}/v1/chat/completions",
        json={"model": model, "messages": messages, "max_tokens": 2},
        timeout=60,
    )
    return answer.status_code == 200 or None


def act(stage: Stage) -> None:
    with stage.platform() as running:
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
