"""A run that gives a reward to samples that the policy made fail trains on what they wrote, and warns of
them. Its replay gives the same bits."""

from pathlib import Path
from typing import Any

import pytest

from tests.kit.platform import (
    Platform,
    final_adapter,
    make_workspace,
    platform,
    run_config,
    verify,
)

pytestmark = [
    pytest.mark.kills,
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.postgres,
    pytest.mark.slow,
]

MAIN = """
from headrace import AgentWorkflow, Grader

class Say(AgentWorkflow):
    async def run(self, ctx):
        reply = await ctx.chat(ctx.prompt)
        if len(reply["content"]) % 2:
            raise ValueError("an odd answer")
        return [*ctx.prompt, reply]

class Check(Grader):
    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            odd = sample.failure == "agent_error"
            ctx.set_sample_reward(name, -1.0 if odd else len(sample.text) / 10)
"""


def play(started: Platform, **advanced: Any) -> tuple[str, dict[str, Any]]:
    config = run_config(advanced={"max_steps": 2, **advanced})
    run = started.submit(config, workspace="w")
    return run, started.wait(run, "finished")


def test_a_failed_sample_trains_with_its_configured_reward(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "workspace", {"rollouts/say/main.py": MAIN})
    with platform(tmp_path / "home") as started:
        made = started.post("/workspaces", {"url": str(workspace), "name": "w"})
        assert made.status_code == 201, made.text
        started.upload("numbers")
        dropped, without = play(started)
        numbered, by_number = play(started, failed_reward=-1.0)
        _, masked = play(started, failed_reward=-1.0, mask_failed=True)
        graded, by_grader = play(started, failed_rewards={"agent_error": "grade"})
        samples = {
            run: started.get(f"/runs/{run}/samples", limit=50)["samples"]
            for run in (dropped, numbered, graded)
        }
        events = started.events(dropped)
        verified = verify(started, numbered)
    failed = {
        run: [s for s in found if s["failure"] is not None and s["step"] == 1]
        for run, found in samples.items()
    }
    assert failed[dropped], "the policy writes odd answers"
    assert {s["reward"] for s in failed[dropped]} == {None}
    assert {s["reward"] for s in failed[numbered]} == {s["reward"] for s in failed[graded]} == {-1}
    assert (verified["status"], verified["findings"]) == ("verified", [])
    warned = [e["data"]["message"] for e in events if e["type"] == "rl.run.warned"]
    assert any("agent_error" in text and "advanced.failed_reward" in text for text in warned)
    adapters = {final_adapter(one) for one in (by_number, masked, without)}
    assert len(adapters) == 3, "masked, they count in the baselines and are not trained on"
    assert final_adapter(by_number) == final_adapter(by_grader) != final_adapter(without)
