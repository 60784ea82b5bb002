"""kill -9 of the process that serves at every step of the deployments of two workspaces under one name:
each version is deployed, once, both answer, and one is undeployed while the other stays."""

from functools import partial

from infra.failpoints import CONSUMERS, runtime_points
from tests.kit.kills import Stage, once
from tests.kit.platform import Platform, eventually, make_workspace, run_config

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
        second = make_workspace(stage.root / "second")
        made = running.post("/workspaces", {"url": str(second), "name": "v"})
        assert made.status_code == 201, made.text
        runs = [running.submit(CONFIG, workspace=place) for place in ("w", "v")]
        for run in runs:
            running.wait(run, "finished")

        def found() -> dict[str, str]:
            """What is active: how to name it, by the run that it serves."""
            rows = running.get("/deployments")["deployments"]
            assert {row["name"] for row in rows} <= {"sums"}
            return {row["run"]: row["ref"] for row in rows if row["status"] == "active"}

        def active() -> dict[str, str] | None:
            refs = found()
            return refs if set(refs) == set(runs) else None

        refs = eventually(active, within_s=120, what="both checkpoints are deployed")
        base = running.get("/deployments")["deployments"][0]["base_model"]
        for ref in refs.values():
            asked = partial(answers, running, f"{base}:{ref}")
            eventually(asked, within_s=60, what="it answers")
        versions = [row["version"] for row in running.get("/deployments")["deployments"]]
        assert sorted(versions) == [1, 2], "each was deployed once"
        assert running.api.delete(f"/deployments/{refs[runs[0]]}").status_code == 202

        def one_is_left() -> bool | None:
            return set(found()) == {runs[1]} or None

        eventually(one_is_left, within_s=60, what="one is undeployed, and the other is not")
        assert answers(running, f"{base}:{refs[runs[1]]}")
