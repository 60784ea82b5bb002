"""kill -9 in the retry of an evaluation of a provider's model: its results are those of an evaluation
that was not disturbed, attempts that have a reward are not made again, and its bound holds."""

import hashlib
import json
from collections import Counter
from typing import Any

from tests.kit.kills import Stage, arm, once
from tests.kit.platform import Platform, eventually, platform
from tests.kit.provider import Reply, completion, provider_in_thread, refusal

POINTS = once(
    "evaluate.intake.decided",
    "evaluate.intake.tx_before_commit",
    "evaluate.intake.tx_after_commit",
    "rollout.perform.GenerateSample.effect_done",
    "grade.perform.GradeGroup.tx_after_commit",
)
ROWS, ATTEMPTS = 8, 2
AT_ONCE = ROWS * ATTEMPTS
"""Requests that may be open when a process dies."""


class Model:
    """A model that refuses every second row while it is `closed`. `asked` counts its answers by the
    evaluation, whose name is that of the model, and the prompt."""

    def __init__(self) -> None:
        self.closed = True
        self.asked: Counter[tuple[str, str]] = Counter()

    def __call__(self, _: int, body: Any) -> Reply:
        prompt = str(body["messages"][-1]["content"])
        if self.closed and int(prompt.split()[-1]) % 2:
            return refusal(400, "not today")
        self.asked[body["model"], prompt] += 1
        digits = int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % 9
        return completion("7" * digits)


def begin(started: Platform, base_url: str, name: str) -> str:
    """Submit an evaluation."""
    experiment = {
        "rollout": "say",
        "entrypoint": "main.py",
        "model_path": f"provider:{name}",
        "dataset": "numbers",
    }
    config = {
        "experiment": experiment,
        "evaluation": {"n": ATTEMPTS, "limit": ROWS, "batch_size": 4},
        "advanced": {"base_url": base_url, "max_calls": 200},
    }
    made = started.post("/evals", {"config": config, "workspace": "w"})
    assert made.status_code == 201, made.text
    return str(made.json()["eval"]["id"])


def wait_until_ended(started: Platform, evaluation: str, *, failed: int) -> Any:
    """The evaluation once so many of its attempts have no reward."""

    def look() -> Any:
        found = started.get(f"/evals/{evaluation}")["eval"]
        if found["status"] in ("pending", "running"):
            return None
        without = started.get(f"/evals/{evaluation}/samples", failed="true", limit=50)
        return found if len(without["samples"]) == failed else None

    return eventually(look, within_s=120, what=f"{evaluation} ends with {failed} failures")


def act(stage: Stage) -> None:
    model = Model()
    with provider_in_thread(model) as fake:
        address = fake.base_url.removeprefix("http://").removesuffix("/v1")
        allowed = {"HEADRACE_NETWORK_ALLOW": f"w={address}"}
        with Stage(stage.root, {}).platform(allowed) as started:
            killed, calm = (begin(started, fake.base_url, name) for name in ("killed", "calm"))
            for evaluation in (killed, calm):
                wait_until_ended(started, evaluation, failed=ROWS * ATTEMPTS // 2)
            model.closed = False
            assert started.post(f"/evals/{calm}/retry", {}).status_code == 200
            undisturbed = wait_until_ended(started, calm, failed=0)
        before = {k: v for k, v in model.asked.items() if k[0] == "killed"}
        with platform(stage.home, environment={**allowed, **arm(stage.points)}) as started:
            assert started.post(f"/evals/{killed}/retry", {}).status_code == 200
            disturbed = wait_until_ended(started, killed, failed=0)
            rewards = [
                started.get(f"/evals/{evaluation}/rows")["rows"] for evaluation in (killed, calm)
            ]
    assert disturbed["metrics"] == undisturbed["metrics"]
    assert json.dumps(rewards[0]) == json.dumps(rewards[1])
    after = {k: v for k, v in model.asked.items() if k[0] == "killed"}
    assert {k: after[k] for k in before} == before, "what has a reward is not asked again"
    extra = sum(after.values()) - ROWS * ATTEMPTS
    assert extra <= len(stage.points) * AT_ONCE
