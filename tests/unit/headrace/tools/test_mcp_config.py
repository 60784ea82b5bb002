"""The MCP servers of a workspace are those of its headrace.toml, and its mcp/main.py."""

from pathlib import Path

import pytest

from headrace import AgentWorkflow
from headrace.tools.mcp_config import InvalidMcpConfig, McpServer, chosen_servers, mcp_servers
from headrace.user_code import discovery
from schemas.errors import InvalidConfig
from schemas.toml.triggers import parse_triggers

TABLES = """
[[mcp]]
name = "calculator"
command = "python tools/calculator.py --fast"

[[mcp]]
name = "search"
url = "https://search.example.com/mcp"

[[mcp]]
name = "local"
command = ["node", "server.js"]
url = "http://127.0.0.1:9000/mcp"
"""


def test_tables_and_the_main_file_are_servers(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text(TABLES)
    (tmp_path / "mcp").mkdir()
    (tmp_path / "mcp" / "main.py").touch()
    found = mcp_servers(tmp_path)
    assert found == [
        McpServer("calculator", tmp_path, ("python", "tools/calculator.py", "--fast")),
        McpServer("search", tmp_path, url="https://search.example.com/mcp"),
        McpServer("local", tmp_path, ("node", "server.js"), "http://127.0.0.1:9000/mcp"),
        McpServer("main", tmp_path),
    ]
    addresses = [one.remote_address for one in found]
    assert addresses == [None, "search.example.com:443", None, None]
    assert parse_triggers(TABLES.encode()) == ()
    assert chosen_servers(found, ["local", "local"]) == [found[2]]
    with pytest.raises(InvalidMcpConfig, match="no MCP server 'x'; the workspace has: calculator"):
        chosen_servers(found, ["x"])
    with pytest.raises(InvalidMcpConfig, match="must be a list of names"):
        chosen_servers(found, "local")


def test_a_workspace_without_servers_has_none(tmp_path: Path) -> None:
    assert mcp_servers(tmp_path) == []
    (tmp_path / "headrace.toml").write_text("trigger = []\n")
    assert mcp_servers(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[mcp]", "headrace.toml cannot be read"),
        ("mcp = 3", "two brackets"),
        ("[[mcp]]\nname = 'x'", "needs a command or a url"),
        ("[[mcp]]\nname = 'x y'\nurl = 'https://h'", "needs a name"),
        ("[[mcp]]\ncommand = 'x'", "needs a name"),
        ("[[mcp]]\nname = 'x'\nurl = 'ftp://h'", "must be an http or https"),
        ("[[mcp]]\nname = 'x'\nurl = 'https://h:port'", "must be an http or https"),
        ("[[mcp]]\nname = 'x'\nurl = 3", "must be an http or https"),
        ("[[mcp]]\nname = 'x'\nurl = 'http://h/mcp'", "must be https"),
        ("[[mcp]]\nname = 'x'\ncommand = []", "text or a list"),
        ("[[mcp]]\nname = 'x'\ncommand = 'a \"'", "cannot be read"),
        ("[[mcp]]\nname = 'x'\ncommand = 'a'\nenv = {}", "may have the keys command, name, url"),
        ("[[mcp]]\nname = 'x'\ncommand = 'a'\n" * 2, "two MCP servers with the name x"),
        ("#" * (70 << 10), "more than 65536 bytes"),
        *[("".join(f"[[mcp]]\nname = 'x{n}'\ncommand = 'a'\n" for n in range(17)), "17 MCP")],
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "headrace.toml").write_text(text)
    with pytest.raises(InvalidMcpConfig, match=says):
        mcp_servers(tmp_path)


@pytest.mark.parametrize("name", ["x y", "", "x" * 65])
def test_a_push_shows_mistakes_too(name: str) -> None:
    with pytest.raises(InvalidConfig):
        parse_triggers(f"[[mcp]]\nname = '{name}'\ncommand = 'a'\n".encode())


def module(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "rollouts" / "say" / "main.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    (tmp_path / "headrace.toml").write_text(TABLES)
    return path


def test_the_built_in_loop_uses_all_servers_and_other_workflows_those_they_list(
    tmp_path: Path,
) -> None:
    own = "\nclass Own(AgentWorkflow):\n    async def run(self, ctx): ...\n"
    loaded = discovery.load(module(tmp_path, "from headrace import AgentWorkflow\n" + own))
    workflow = discovery.workflow_of(loaded)
    assert workflow is not None
    assert discovery.servers_of(loaded, workflow) == []
    workflow.mcp = ["search"]
    assert [one.name for one in discovery.servers_of(loaded, workflow)] == ["search"]
    workflow.mcp = ["nothing"]
    with pytest.raises(discovery.EntryPointError, match="no MCP server 'nothing'"):
        discovery.servers_of(loaded, workflow)


def test_servers_alone_make_a_workflow(tmp_path: Path) -> None:
    loaded = discovery.load(module(tmp_path, "x = 1\n"))
    assert discovery.workflow_of(loaded) is AgentWorkflow
    assert len(discovery.servers_of(loaded, AgentWorkflow)) == 3


async def test_a_server_needs_the_package_mcp(tmp_path: Path) -> None:
    loaded = discovery.load(module(tmp_path, "x = 1\n"))
    with pytest.raises(discovery.EntryPointError, match="needs the package mcp, "):
        await discovery.open_tools(loaded, AgentWorkflow)
