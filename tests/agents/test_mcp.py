"""MCP servers of a workspace, by the real package `mcp` in an environment of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infra.operations.local.free_port import free_port
from tests.agents.mcp_workspace import PROGRAM, write_workspace
from tests.kit.package_environment import shared_environment

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.agents, pytest.mark.processes]


@pytest.fixture(scope="module", params=["mcp>=2,<3", "mcp>=1.20,<2"])
def python(request: pytest.FixtureRequest) -> Path:
    """The Python of an environment with one of the packages."""
    return shared_environment([request.param], interpreter=sys.executable)


def run(python: Path, workspace: Path, program: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FLAG": str(workspace / "died")}
    return subprocess.run(
        [str(python), "-c", program, str(workspace)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_tools_of_servers_are_called_and_servers_that_die_are_started_again(
    python: Path, tmp_path: Path
) -> None:
    write_workspace(tmp_path, port=free_port())
    done = run(python, tmp_path, PROGRAM)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    names = {"add", "die_once", "die_always", "hang", "pid", "big", "fail", "double"}
    assert set(said["names"]) == names
    assert said["sums"] == ["1", "2", "3", "4", "5"]
    assert said["double"] == ["8"]
    assert said["wrong"][0].startswith("error: add: Error executing tool add: 2 validation errors")
    assert said["fail"][0].startswith("error: fail: Error executing tool fail")
    assert said["big"] == [8192]
    # A server that is killed changes nothing, also if it was killed in the middle of a call.
    assert (said["once"], said["killed"]) == (["survived"], ["5"])
    assert said["always"][0].startswith("error: die_always: MCP server main ended during the call")
    assert said["hang"] == ["error: hang did not return within 1 s"]
    assert said["later"] == ["6"]


START = """
import asyncio, sys
from pathlib import Path
from headrace.tools.mcp_client import McpServerUnusable, with_servers
from headrace.tools.mcp_config import mcp_servers
from headrace.tools.tool_set import ToolSet

try:
    asyncio.run(with_servers(ToolSet(), mcp_servers(Path(sys.argv[1]))))
except McpServerUnusable as error:
    print(error)
"""

MANY = """
from server import mcp

for number in range(COUNT):
    mcp.tool(name=f"tool_{number}")(lambda: None)
"""


@pytest.mark.parametrize(
    ("main", "says"),
    [
        (
            MANY.replace("COUNT", "500"),
            "MCP server main offers 500 tools or more; offer at most 128",
        ),
        (MANY.replace("COUNT", "0"), "MCP server main offers no tools"),
        ("raise ValueError('wrong')", "MCP server main does not start: .*ValueError: wrong"),
        ("x = 1", "defines 0 FastMCP objects; define one"),
        (MANY.replace("COUNT", "1") + "mcp.tool(name='a b')(lambda: 1)", "'a b' has a name that"),
    ],
)
def test_a_server_that_cannot_be_used_is_named(
    python: Path, tmp_path: Path, main: str, says: str
) -> None:
    write_workspace(tmp_path, port=free_port())
    (tmp_path / "headrace.toml").unlink()
    (tmp_path / "mcp" / "main.py").write_text(main)
    for path in (tmp_path / "mcp" / "tools").iterdir():
        path.unlink()
    done = run(python, tmp_path, START)
    assert done.returncode == 0, done.stderr[-3000:]

    assert re.search(says, done.stdout, re.DOTALL), done.stdout
