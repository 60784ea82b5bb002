"""MCP servers of a workspace run in the sandbox of their rollout, with the real package `mcp`."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from infra.blobs.artifacts import reference
from infra.ports.packages import DeclaredPackages
from infra.ports.services import SandboxOwner, WorkflowResult
from infra.sandbox.sandbox import LocalUserCode
from schemas.artifact_refs import ArtifactRef
from schemas.errors import UserCodeError
from schemas.sampling import Message
from schemas.specs import Entrypoint, PackageEnvironment, RolloutRef
from tests.agents.mcp_workspace import MAIN as MCP_MAIN
from tests.agents.mcp_workspace import SERVER
from tests.contracts.user_code_suite import make_snapshot

pytestmark = [
    pytest.mark.agents,
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="module"),
]

WORKFLOW = """
import dataclasses
import os
from headrace import AgentWorkflow


class Do(AgentWorkflow):
    mcp = ["main", "files"]

    async def run(self, ctx):
        name, _, arguments = ctx.prompt[0]["content"].partition(" ")
        ctx.tools._tools["hang"] = dataclasses.replace(ctx.tools._tools["hang"], timeout_s=1)
        call = {"id": "c", "function": {"name": name, "arguments": arguments or "{}"}}
        [answer] = await ctx.call_tools({"tool_calls": [call]})
        text = f'{os.readlink("/proc/self/ns/pid")} {answer["content"]}'
        return [*ctx.prompt, {"role": "assistant", "content": text}]
"""

TOOLS = '''
import json
import os
import socket
import time

from server import mcp

FLAG = "/tmp/died"


@mcp.tool()
def add(left: int, right: int) -> int:
    return left + right


@mcp.tool()
def look(path: str, port: int) -> str:
    """Say what this process may see and do."""
    seen = {}
    try:
        seen["file"] = open(path).read()
    except OSError:
        seen["file"] = None
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
        seen["network"] = True
    except OSError:
        seen["network"] = False
    status = dict(line.split(":\\t", 1) for line in open("/proc/self/status"))
    for name in ("NoNewPrivs", "Seccomp", "CapEff"):
        seen[name] = int(status[name], 16)
    return json.dumps({**seen, "namespace": os.readlink("/proc/self/ns/pid")})


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
def big() -> str:
    return "x" * 10_000_000


@mcp.tool()
def slow() -> str:
    if not os.path.exists("/tmp/slow"):
        open("/tmp/slow", "w").close()
        time.sleep(1000)
    return "at last"
'''

FILES = """
import os
from pathlib import Path

try:
    from mcp.server.fastmcp import FastMCP
except ImportError:
    from mcp.server import MCPServer as FastMCP

server = FastMCP("files")


@server.tool()
def folder() -> str:
    return os.getcwd() + " " + ",".join(sorted(path.name for path in Path().iterdir()))


server.run(transport="stdio")
"""

TREE = {
    "rollouts/say/main.py": WORKFLOW,
    "mcp/main.py": MCP_MAIN,
    "mcp/server/__init__.py": SERVER,
    "mcp/tools/__init__.py": "",
    "mcp/tools/all_.py": TOOLS,
    "files/server.py": FILES,
    "headrace.toml": '[[mcp]]\nname = "files"\ncommand = "python files/server.py"\n',
}
OWN_NAMESPACE = str(Path("/proc/self/ns/pid").readlink())
PACKAGE = DeclaredPackages(path="rollouts/say/pyproject.toml", dependencies=("mcp>=1.20,<2",))


@dataclass
class Bench:
    """User code at a level, and a rollout that calls the tool that its prompt names."""

    user: LocalUserCode
    rollout: RolloutRef
    blobs: dict[str, bytes]

    async def call(self, what: str, **arguments: object) -> tuple[str, str]:
        """The result of a call of a tool, and what the attempt has printed."""
        done = await self.attempt(f"{what} {json.dumps(arguments)}")
        assert done.messages is not None
        _, _, text = done.messages[-1].content.partition(" ")
        return text, done.output.stdout if done.output else ""

    async def attempt(
        self, prompt: str, rollout: RolloutRef | None = None, run: str = "r1"
    ) -> WorkflowResult:
        return await self.user.run_workflow(
            rollout or self.rollout,
            owner=SandboxOwner(run=run),
            sample=f"{run}-{prompt[:9]}",
            prompt=[Message(role="user", content=prompt)],
            metadata={},
            base_path="/v1/none",
            api_key="none",
        )

    def of(self, files: dict[str, str]) -> RolloutRef:
        """The same rollout in another tree."""
        return self.rollout.model_copy(update={"snapshot": self.add(make_snapshot(files))})

    def add(self, data: bytes) -> ArtifactRef:
        self.blobs[reference(data).sha256] = data
        return reference(data)


@contextlib.asynccontextmanager
async def opened(level: str) -> AsyncIterator[Bench]:
    blobs: dict[str, bytes] = {}

    async def fetch(ref: ArtifactRef) -> bytes:
        return blobs[ref.sha256]

    user = LocalUserCode(level, fetch=fetch)
    try:
        resolved = await user.resolve(PACKAGE)
        bench = Bench(user, None, blobs)  # type: ignore[arg-type]  # it is made in the next lines
        environment = PackageEnvironment(
            key=resolved.key,
            lock=bench.add(resolved.pins.encode()),
            python=resolved.python,
            platform=resolved.platform,
        )
        bench.rollout = RolloutRef(
            snapshot=bench.add(make_snapshot(TREE)),
            commit="0" * 40,
            entrypoint=Entrypoint(rollout="say"),
            environment=environment,
            workflow="Do",
            grader=None,
            workflow_timeout_s=90,
            grader_timeout_s=5,
        )
        yield bench
    finally:
        await user.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with opened("bwrap") as made:
        yield made


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file that every user of this machine may read."""
    directory = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="headrace-test-"))
    directory.chmod(0o755)
    path = directory / "note"
    path.write_text("outside")
    path.chmod(0o644)
    yield path
    path.unlink()
    directory.rmdir()


async def look(bench: Bench, secret: Path) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        text, _ = await bench.call("look", path=str(secret), port=port)
    seen: dict[str, Any] = json.loads(text)
    return seen


async def test_a_server_sees_and_may_do_nothing_outside(bench: Bench, secret: Path) -> None:
    seen = await look(bench, secret)
    assert (seen["file"], seen["network"]) == (None, False)
    assert (seen["NoNewPrivs"], seen["Seccomp"], seen["CapEff"]) == (1, 2, 0)
    done = await bench.attempt("add {}")
    assert done.messages is not None
    assert done.messages[-1].content.startswith(f"{seen['namespace']} "), "that of the workflow"
    assert seen["namespace"] != OWN_NAMESPACE


async def test_without_the_sandbox_a_server_sees_what_is_outside(secret: Path) -> None:
    """The twin: what the test above looks for is there."""
    async with opened("process-trusted") as trusted:
        seen = await look(trusted, secret)
    assert (seen["file"], seen["network"]) == ("outside", True)
    assert seen["namespace"] == OWN_NAMESPACE


async def test_the_servers_of_a_workspace_answer(bench: Bench) -> None:
    assert await bench.call("add", left=1, right=2) == ("3", "")
    text, _ = await bench.call("folder")
    folder, _, names = text.partition(" ")
    assert "headrace.toml,mcp,rollouts" in names, f"{folder} is the workspace"
    text, _ = await bench.call("big")
    assert (len(text), text[-24:]) == (8192, "(cut after 8192 characters)"[-24:])


async def test_a_server_that_dies_or_hangs_is_data_and_seen_in_the_record(bench: Bench) -> None:
    text, printed = await bench.call("die_once")
    assert text == "survived"
    assert "[headrace] MCP server main ended during a call" in printed
    assert "[headrace] MCP server main was started again" in printed
    text, printed = await bench.call("die_always")
    assert text.startswith("error: die_always: MCP server main ended during the call")
    assert (await bench.call("add", left=1, right=2))[0] == "3", "it runs when it is made to hang"
    text, _ = await bench.call("hang")
    assert text == "error: hang did not return within 1 s"
    text, printed = await bench.call("add", left=2, right=2)
    assert text == "4"
    assert "MCP server main hangs, so it is ended" in printed


async def test_a_server_that_is_killed_in_a_call_changes_no_result(bench: Bench) -> None:
    calling = asyncio.ensure_future(bench.call("slow"))
    async with asyncio.timeout(60):
        while not (found := servers_of(bench)):
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    text, printed = await calling
    assert text == "at last"
    assert "MCP server main ended during a call" in printed


def servers_of(bench: Bench) -> list[int]:
    """The processes of `mcp/main.py` in the sandboxes of a bench."""
    root = str(bench.user._sdk)
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):
                said = (place / "cmdline").read_bytes().split(b"\0")
                below = b"mcp_program.py" in b" ".join(said) and len(said) <= 5
                if below and root in _environment(place):
                    found.append(int(place.name))
    return found


def _environment(place: Path) -> str:
    """The mounts of a process, which name the directory of its SDK on this machine."""
    return (place / "mountinfo").read_text()


MANY = (
    "from server import mcp\nfor number in range(500):\n"
    "    mcp.tool(name=f'tool_{number}')(lambda: None)\n"
)
WITHOUT_FILES = WORKFLOW.replace('["main", "files"]', '["main"]')


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ("\n", "MCP server main offers no tools"),
        (MANY, "MCP server main offers 500 tools or more; offer at most 128"),
        ("raise ValueError('wrong')\n", "MCP server main does not start"),
    ],
)
async def test_a_server_that_cannot_be_used_is_named(bench: Bench, tools: str, says: str) -> None:
    tree = {
        **TREE,
        "mcp/tools/all_.py": tools,
        "headrace.toml": "",
        "rollouts/say/main.py": WITHOUT_FILES,
    }
    with pytest.raises(UserCodeError, match=says):
        await bench.attempt("add {}", bench.of(tree), run=f"r-{len(tools)}")
