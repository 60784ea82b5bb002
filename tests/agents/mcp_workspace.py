"""A workspace with MCP servers, and a program that calls their tools from the rollout's environment."""

from pathlib import Path

MAIN = """
import asyncio

from server import mcp
from tools import *

if __name__ == "__main__":
    mcp.run()
"""

SERVER = """
try:
    from mcp.server.fastmcp import FastMCP
except ImportError:
    from mcp.server import MCPServer as FastMCP

mcp = FastMCP("tools")
"""

TOOLS = '''
import os
import time

from server import mcp

FLAG = os.environ["FLAG"]


@mcp.tool()
def add(left: int, right: int) -> int:
    """Add two numbers."""
    print("noise")
    os.system("echo more noise")
    return left + right


@mcp.tool()
def die_once() -> str:
    if not os.path.exists(FLAG):
        open(FLAG, "w").close()
        os._exit(3)
    return "survived"


@mcp.tool()
def die_always() -> str:
    os._exit(3)


@mcp.tool()
def hang() -> str:
    time.sleep(1000)


@mcp.tool()
def pid() -> int:
    return os.getpid()


@mcp.tool()
def big() -> str:
    return "x" * 1_000_000


@mcp.tool()
def fail() -> str:
    raise ValueError("no")
'''

HTTP = """
try:
    from mcp.server.fastmcp import FastMCP

    server = FastMCP("web", host="127.0.0.1", port=PORT)
    options = {}
except ImportError:
    from mcp.server import MCPServer

    server = MCPServer("web")
    options = {"host": "127.0.0.1", "port": PORT}


@server.tool()
def double(of: int) -> int:
    return 2 * of


server.run(transport="streamable-http", **options)
"""

PROGRAM = """
import asyncio, dataclasses, json, os, signal, sys
from pathlib import Path

from headrace.tools.mcp_client import with_servers
from headrace.tools.mcp_config import mcp_servers
from headrace.tools.tool_set import ToolSet


async def main():
    tools = await with_servers(ToolSet(), mcp_servers(Path(sys.argv[1])))
    said = {"names": tools.names, "add": tools.specs[0]["function"]}
    tools._tools["hang"] = dataclasses.replace(tools._tools["hang"], timeout_s=1)

    async def call(*calls):
        asked = [
            {"id": "c", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in calls
        ]
        answers = await tools.answer({"tool_calls": asked}, context=None)
        return [answer["content"] for answer in answers]

    said["sums"] = await call(*[("add", {"left": 1, "right": n}) for n in range(5)])
    said["double"] = await call(("double", {"of": 4}))
    said["wrong"] = await call(("add", {"left": "x"}))
    said["fail"] = await call(("fail", {}))
    said["big"] = [len(text) for text in await call(("big", {}))]
    said["once"] = await call(("die_once", {}))
    said["always"] = await call(("die_always", {}))
    [pid] = await call(("pid", {}))
    os.kill(int(pid), signal.SIGKILL)
    said["killed"] = await call(("add", {"left": 2, "right": 3}))
    said["hang"] = await call(("hang", {}))
    said["later"] = await call(("add", {"left": 2, "right": 4}))
    print(json.dumps(said))


asyncio.run(main())
"""


def write_workspace(root: Path, *, port: int) -> None:
    """Write a workspace with `mcp/main.py` in the older hosted layout, and a server over HTTP."""
    files = {
        "mcp/main.py": MAIN,
        "mcp/server/__init__.py": SERVER,
        "mcp/tools/__init__.py": "",
        "mcp/tools/numbers_.py": TOOLS,
        "web/server.py": HTTP.replace("PORT", str(port)),
        "headrace.toml": (
            '[[mcp]]\nname = "web"\ncommand = "python web/server.py"\n'
            f'url = "http://127.0.0.1:{port}/mcp"\n'
        ),
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
