"""The workflow of examples/calculator, with its MCP server and a policy that answers by a script."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.kit.package_environment import shared_environment

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "calculator"
pytestmark = [pytest.mark.agents, pytest.mark.processes]

PROGRAM = """
import asyncio, importlib.util, json, sys
from pathlib import Path

from headrace.tools.mcp_client import with_servers
from headrace.tools.mcp_config import mcp_servers
from headrace.tools.tool_set import ToolSet

workspace = Path(sys.argv[1])
spec = importlib.util.spec_from_file_location("rollout", workspace / "rollouts/calculator/main.py")
rollout = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rollout)


class Scripted:
    prompt = [{"role": "user", "content": "State the final answer: 873 - 905 ="}]

    def __init__(self, first, tools):
        self.first, self.tools, self.answers = first, tools, 0

    async def chat(self, messages):
        self.answers += 1
        content = self.first if self.answers == 1 else messages[-1]["content"]
        return {"role": "assistant", "content": content}

    async def call_tools(self, reply):
        return await self.tools.answer(reply, context=None)


async def main():
    tools = await with_servers(ToolSet(), mcp_servers(workspace))
    said = {}
    for first in json.loads(sys.argv[2]):
        policy = Scripted(first, tools)
        messages = await rollout.Calculate().run(policy)
        last = messages[-1]["content"]
        said[first] = [policy.answers, last, rollout.right_answer(last, "-32")]
    print(json.dumps(said))


asyncio.run(main())
"""


def test_a_call_in_an_answer_is_computed_by_the_server() -> None:
    project = tomllib.loads((EXAMPLE / "rollouts" / "calculator" / "pyproject.toml").read_text())
    python = shared_environment(project["project"]["dependencies"], interpreter=sys.executable)
    answers = ["calc(873 - 905)", "calc(873+905) ", "-32", "It is calc(873 - 905)", "calc(1, 2)"]
    done = subprocess.run(
        [str(python), "-c", PROGRAM, str(EXAMPLE), json.dumps(answers)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {
        "calc(873 - 905)": [2, "-32", 1.0],
        "calc(873+905) ": [2, "1778", 0.0],
        "-32": [1, "-32", 1.0],
        "It is calc(873 - 905)": [1, "It is calc(873 - 905)", 0.0],
        "calc(1, 2)": [1, "calc(1, 2)", 0.0],
    }
