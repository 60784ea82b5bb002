"""kill -9 of an MCP server, of the host of its workflow, and of the worker, in the middle of calls: the
run ends with the same bits, and nothing is lost or done twice. With the real package `mcp`."""

import json
from pathlib import Path

import pytest

from tests.chaos.victims import kill_after_steps
from tests.kit.kills import Stage
from tests.kit.ledger import check
from tests.kit.platform import final_adapter, run_config

pytestmark = [
    pytest.mark.agents,
    pytest.mark.kills,
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.postgres,
]

STEPS = 5
CONFIG = run_config(
    experiment={"rollout": "calling"},
    training={"max_response_length": 12, "max_answer_length": 6},
    advanced={"max_steps": STEPS, "state_interval": 2},
)
WORKFLOW = """
import json
from headrace import AgentWorkflow, Grader


class Ask(AgentWorkflow):
    mcp = ["main"]

    async def run(self, ctx):
        reply = await ctx.chat(ctx.prompt)
        arguments = json.dumps({"text": reply["content"]})
        call = {"id": "c", "function": {"name": "digits", "arguments": arguments}}
        [answer] = await ctx.call_tools({"tool_calls": [call]})
        follow = {"role": "user", "content": answer["content"]}
        last = await ctx.chat([*ctx.prompt, reply, follow])
        return [*ctx.prompt, reply, follow, last]


class Count(Grader):
    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            assert sample.messages[-2]["content"].isdigit(), sample.messages[-2]
            digits = sum(character.isdigit() for character in sample.text)
            ctx.set_sample_reward(name, digits / 8 + float(sample.messages[-2]["content"]))
"""
SERVER = '''
import time
from mcp.server.fastmcp import FastMCP

mcp = FastMCP("counter")


@mcp.tool()
async def digits(text: str) -> int:
    """Count the digits of a text."""
    import asyncio
    await asyncio.sleep(0.4)
    return sum(character.isdigit() for character in text)
'''
FILES = {
    "rollouts/calling/main.py": WORKFLOW,
    "rollouts/calling/pyproject.toml": (
        '[project]\nname = "calling"\nversion = "0"\ndependencies = ["mcp>=1.20,<2"]\n'
    ),
    "mcp/main.py": SERVER,
}
PROGRAM, HOST = "mcp_program.py", "headrace/user_code/user_code_host.py workflow"
KILLS = {1: PROGRAM, 2: HOST, 3: "worker", 4: PROGRAM}
"""What dies after which step. The calls of the next step are being made."""


def test_kills_around_calls_of_an_mcp_server_change_nothing(tmp_path: Path) -> None:
    with Stage(tmp_path, {}).platform(files=FILES) as started:
        calm = started.wait(started.submit(CONFIG, workspace="w"), "finished", within_s=200)
        run = started.submit(CONFIG, workspace="w")
        kill_after_steps(started, run, KILLS)
        info = started.wait(run, "finished", within_s=200)
        events = started.events(run)
        samples = started.get(f"/runs/{run}/samples", limit=100)["samples"]
        whole = [started.get(f"/runs/{run}/samples/{sample['id']}") for sample in samples]
    assert final_adapter(info) == final_adapter(calm)
    check(events, steps=STEPS, groups=2, samples=4)
    assert len(samples) == STEPS * 8
    assert not [sample for sample in samples if sample.get("failure")]
    assert len({sample["reward"] for sample in samples}) > 1
    assert "MCP server main ended during a call" in json.dumps(whole), "the kill is in the record"
