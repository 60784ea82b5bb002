"""kill -9 at every step of a regrade and of its comparison of gradients: grades, report and cosines are
those of a regrade that nobody disturbs. Each consumer has a process."""

from typing import Any

from infra.failpoints import CONSUMERS, runtime_points
from tests.kit.kills import Stage, once
from tests.kit.platform import Platform, eventually, git, make_workspace, run_config, verify

POINTS = once(
    *runtime_points("regrade", CONSUMERS["regrade"]),
    *runtime_points("compare", CONSUMERS["compare"]),
)
OTHER = """
from headrace import AgentWorkflow, Grader


class Say(AgentWorkflow):
    async def run(self, ctx):
        reply = await ctx.chat(ctx.prompt)
        return [*ctx.prompt, reply]


class Vowels(Grader):
    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            ctx.set_sample_reward(name, sum(letter in "aeiou" for letter in sample.text) / 4)
"""


def regrade(running: Platform, run: str, body: dict[str, Any]) -> Any:
    """Request a regrade, and return it once it and its gradients are complete."""
    asked = running.post(f"/runs/{run}/regrades", body)
    assert asked.status_code == 202, asked.text
    identity = asked.json()["regrade"]["id"]

    def is_complete() -> Any:
        found = running.get(f"/regrades/{identity}")["regrade"]
        gradients = found["gradients"]
        is_comparing = gradients is not None and gradients["status"] == "running"
        return found if found["status"] in ("finished", "failed") and not is_comparing else None

    return eventually(is_complete, within_s=240, what=f"regrade {identity} is complete")


def figures(running: Platform, found: Any) -> Any:
    """The figures of a regrade, and the hashes of its grades: what must not depend on kills."""
    assert found["status"] == "finished", found["error"]
    parts = [
        event["data"]["artifact"]["sha256"]
        for event in running.events(found["run"])
        if event["type"] == "rl.regrade.part-graded" and event["data"]["regrade"] == found["id"]
    ]
    names = ("report", "by_step", "worst", "ungraded", "failures", "gradients")
    return parts, {name: found[name] for name in names}


def act(stage: Stage) -> None:
    with stage.platform({"HEADRACE_WORKERS": "each"}) as running:
        run = running.submit(run_config(), workspace="w")
        running.wait(run, "finished")
        workspace = make_workspace(stage.root / "workspace", {"rollouts/say/main.py": OTHER})
        body = {"grader": git(workspace, "rev-parse", "HEAD"), "gradients": True}
        killed = figures(running, regrade(running, run, body))
        calm = figures(running, regrade(running, run, body))
        verified = verify(running, run)
    assert killed == calm
    assert len(killed[0]) == 1
    assert [one["step"] for one in killed[1]["gradients"]["steps"]] == [1, 2, 3, 4]
    assert killed[1]["report"]["changed_share"] > 0
    assert (verified["status"], verified["findings"]) == ("verified", [])
