"""The MCP servers of a workspace: `[[mcp]]` tables of headrace.toml, and `mcp/main.py`."""

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FILE = "headrace.toml"
MAIN = "mcp/main.py"
MAIN_NAME = "main"
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
KEYS = {"name", "command", "url"}
LARGEST_FILE = 64 << 10
MOST_SERVERS = 16
LOCAL_HOSTS = ("127.0.0.1", "localhost")


class InvalidMcpConfig(ValueError):
    """The MCP servers of a workspace cannot be used; the text says which and why."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server of MCP. It is a program that speaks over its standard input and output (`command`), or a
    server at `url`. With both, the program is started and serves at the url. `folder` is the
    workspace. A server without either is `mcp/main.py`."""

    name: str
    folder: Path
    command: tuple[str, ...] = ()
    url: str | None = None

    @property
    def remote_address(self) -> str | None:
        """The host:port of a server elsewhere, which `advanced.network` must name."""
        if self.url is None:
            return None
        parts = urlsplit(self.url)
        if parts.hostname in LOCAL_HOSTS:
            return None
        return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def mcp_servers(workspace: Path) -> list[McpServer]:
    """Return the servers of a workspace in the order of the file. Raises InvalidMcpConfig."""
    found = [
        _server(table, number, workspace) for number, table in enumerate(_tables(workspace), 1)
    ]
    if (workspace / MAIN).is_file():
        found.append(McpServer(MAIN_NAME, workspace))
    names = [server.name for server in found]
    for name in names:
        if names.count(name) > 1:
            raise InvalidMcpConfig(f"there are two MCP servers with the name {name}; rename one")
    if len(found) > MOST_SERVERS:
        raise InvalidMcpConfig(f"there are {len(found)} MCP servers; keep at most {MOST_SERVERS}")
    return found


def chosen_servers(servers: list[McpServer], wanted: object) -> list[McpServer]:
    """Return the servers whose names an author listed. Raises InvalidMcpConfig for an unknown name."""
    if not isinstance(wanted, list | tuple) or not all(isinstance(one, str) for one in wanted):
        raise InvalidMcpConfig("mcp must be a list of names of servers")
    known = {server.name: server for server in servers}
    for name in wanted:
        if name not in known:
            has = ", ".join(known) or "none"
            raise InvalidMcpConfig(
                f"there is no MCP server {name[:80]!r}; the workspace has: {has}"
            )
    return [known[name] for name in dict.fromkeys(wanted)]


def _tables(workspace: Path) -> list[Any]:
    path = workspace / FILE
    if not path.is_file():
        return []
    if path.stat().st_size > LARGEST_FILE:
        raise InvalidMcpConfig(f"{FILE} has more than {LARGEST_FILE} bytes")
    try:
        tables = tomllib.loads(path.read_text()).get("mcp", [])
    except (ValueError, RecursionError) as error:
        raise InvalidMcpConfig(f"{FILE} cannot be read: {error}") from error
    if not isinstance(tables, list):
        raise InvalidMcpConfig(f"{FILE}: mcp must be [[mcp]] with two brackets")
    return tables


def _server(table: Any, number: int, workspace: Path) -> McpServer:
    place = f"{FILE}: [[mcp]] number {number}"
    if not isinstance(table, dict) or set(table) - KEYS:
        raise InvalidMcpConfig(f"{place} may have the keys {', '.join(sorted(KEYS))} only")
    name, command, url = table.get("name"), table.get("command"), table.get("url")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidMcpConfig(f"{place} needs a name of 1 to 64 letters, digits, `_` and `-`")
    if command is None and url is None:
        raise InvalidMcpConfig(f"{place} ({name}) needs a command or a url")
    return McpServer(name, workspace, _words(command, place), _checked_url(url, place))


def _words(command: object, place: str) -> tuple[str, ...]:
    if command is None:
        return ()
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise InvalidMcpConfig(f"{place}: command cannot be read: {error}") from error
    if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
        raise InvalidMcpConfig(f"{place}: command must be text or a list of texts")
    return tuple(words)


def _checked_url(url: object, place: str) -> str | None:
    if url is None:
        return None
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        usable = parts is not None and parts.hostname is not None and parts.port != 0
    except ValueError:
        usable, parts = False, None
    if not usable or parts is None or parts.scheme not in ("http", "https"):
        raise InvalidMcpConfig(f"{place}: url must be an http or https address")
    if parts.scheme == "http" and parts.hostname not in LOCAL_HOSTS:
        raise InvalidMcpConfig(f"{place}: a url of another machine must be https")
    return str(url)
