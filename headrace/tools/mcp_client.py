"""Connections to MCP servers, by the package `mcp` of the rollout's environment (1.x or 2.x).

A connection belongs to a task of its own, which opens and closes it. If a server dies, it is started
again, and the calls that it had not answered are made once more. So a server that is killed changes no
result, as long as its tools are functions of their arguments.
"""

import asyncio
import contextlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from headrace.attempt_output import note_running
from headrace.tools.argument_types import Schema
from headrace.tools.function_tool import CALL_TIMEOUT_S, LONGEST_RESULT, NAME
from headrace.tools.mcp_config import McpServer
from headrace.tools.results import ToolError
from headrace.tools.tool_set import ToolSet

START_S = 30.0
TRIES = 2
MOST_SERVER_TOOLS = 128
MOST_PAGES = 32
LARGEST_SCHEMA = 64 << 10
LONGEST_DESCRIPTION = 8192
PING_S = 2.0
KEPT_STDERR = 4096
READ_S = 2.0
CLOSED_CODE = -32000
"""The code of the error of a call whose connection was closed."""

T = TypeVar("T")


class McpServerUnusable(ToolError):
    """A server does not start, or its tools cannot be offered; the text says why."""


class _Lost(Exception):
    """The connection is gone, so the call may be made again."""


class McpConnection:
    """A connection to one server. It is opened by `open`, and again by a call that finds it lost."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._opening = asyncio.Lock()
        self._session: Any = None
        self._task: asyncio.Task[None] | None = None
        self._is_doubtful = False
        self._was_open = False
        self._stderr = StderrTail()

    @property
    def name(self) -> str:
        return self._server.name

    async def open(self) -> "list[McpTool]":
        """Start the server and return its tools. Raises McpServerUnusable."""
        listed = await self._repeat(lambda session: _list_tools(session, self._server.name))
        if not listed:
            raise McpServerUnusable(
                f"MCP server {self.name} offers no tools; add some or remove it"
            )
        return [_tool_of(self, one) for one in listed]

    async def call(self, name: str, arguments: dict[str, object]) -> object:
        """Call a tool and return the text of its result. Raises ToolError when the tool failed, and
        McpServerUnusable when the server ended TRIES times during the call."""
        try:
            result = await self._repeat(lambda session: session.call_tool(name, arguments))
        except asyncio.CancelledError:
            self._is_doubtful = True  # the call took too long, perhaps because the server hangs
            raise
        text = text_of(result)
        if _either(result, "is_error", "isError"):
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """End the server, if it runs."""
        if task := self._forget():
            await asyncio.wait({task})

    def _forget(self) -> "asyncio.Task[None] | None":
        """Let the connection end. Returns the task that ends it."""
        task, self._task, self._session = self._task, None, None
        if task is not None:
            task.cancel()
        return task

    async def _repeat(self, ask: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """Ask the server. If the connection is lost meanwhile, ask once more over a new one."""
        for _ in range(TRIES):
            session, task = await self._connect()
            try:
                return await _unless_ended(ask(session), task)
            except _Lost as error:
                await self._drop(session)
                why = await self._why(error)
                note_running(f"MCP server {self.name} ended during a call: {why}")
        raise McpServerUnusable(f"MCP server {self.name} ended during the call: {why}")

    async def _connect(self) -> "tuple[Any, asyncio.Task[None]]":
        """Return the session and the task that keeps it open."""
        async with self._opening:
            if self._task is not None and self._is_doubtful and not await self._answers():
                note_running(f"MCP server {self.name} hangs, so it is ended")
                await self.close()
            task = self._task
            if task is None or task.done():
                task = await self._start()
                if self._was_open:
                    note_running(f"MCP server {self.name} was started again")
                self._was_open = True
            self._is_doubtful = False
            return self._session, task

    async def _answers(self) -> bool:
        """Whether the server answers a ping in time."""
        try:
            async with asyncio.timeout(PING_S):
                await self._session.send_ping()
        except Exception:  # the package of the environment raises errors of its own
            return False
        return True

    async def _start(self) -> "asyncio.Task[None]":
        """Open the connection, and return the task that keeps it open. Raises McpServerUnusable after
        TRIES attempts."""
        for _ in range(TRIES):
            opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._task = task = asyncio.create_task(self._serve(opened))
            try:
                async with asyncio.timeout(START_S):
                    self._session = await opened
                return task
            except TimeoutError:
                await self.close()
                why = f"it did not answer within {START_S:g} s"
                raise McpServerUnusable(self._not_started(why)) from None
            except (McpServerUnusable, asyncio.CancelledError):
                self._forget()
                raise
            except Exception as error:  # of the package, of its transport, or of the system
                await self.close()
                last = error
        raise McpServerUnusable(self._not_started(await self._why(last)))

    def _not_started(self, why: str) -> str:
        return f"MCP server {self.name} does not start: {why}"

    async def _drop(self, session: Any) -> None:
        """Close the connection if this is still its session."""
        async with self._opening:
            if self._session is session:
                await self.close()

    async def _serve(self, opened: "asyncio.Future[Any]") -> None:
        """Open the connection, and keep it until it ends or this is cancelled."""
        try:
            async with AsyncExitStack() as stack:
                session = await _open_session(self._server, stack, self._stderr)
                if not opened.done():
                    opened.set_result(session)
                await asyncio.Event().wait()
        except BaseException as error:  # `open` must get any error, a group of them too
            if not opened.done():
                cause = _first_cause(error)
                opened.set_exception(cause if isinstance(cause, Exception) else _Lost("it ended"))
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _why(self, error: BaseException) -> str:
        """The reason of a failure, with the last lines that the server wrote before its connection was
        closed."""
        what = str(error) if isinstance(error, _Lost) else f"{type(error).__name__}: {error}"
        written = await self._stderr.text()
        return f"{what}; its last output: {written}" if written else what


async def with_servers(functions: ToolSet, servers: Sequence[McpServer]) -> ToolSet:
    """Start the servers, and return their tools together with the functions. Raises McpServerUnusable
    when a server cannot be used, and UnusableTools when tools cannot be offered together."""
    if not servers:
        return functions
    connections = [McpConnection(server) for server in servers]
    listed = await asyncio.gather(*(connection.open() for connection in connections))
    return ToolSet([*functions, *(tool for tools in listed for tool in tools)])


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool of a server, as the model sees it."""

    name: str
    description: str
    parameters: Schema
    connection: McpConnection = field(repr=False)
    timeout_s: float = CALL_TIMEOUT_S
    max_characters: int = LONGEST_RESULT
    is_async: bool = True

    async def call(self, arguments: dict[str, object], context: object) -> object:
        return await self.connection.call(self.name, arguments)


class StderrTail:
    """The end of what servers write to their standard error, which is also passed on to ours."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._reader: threading.Thread | None = None

    def open(self) -> Any:
        """Return a file for a process to write to."""
        reading, writing = os.pipe()
        self._kept.clear()
        self._reader = threading.Thread(target=self._read, args=(reading,), name="mcp", daemon=True)
        self._reader.start()
        return os.fdopen(writing, "w")

    async def text(self) -> str:
        """The last lines that were written, all of them once their processes have ended. A process
        that goes on is not waited for longer than READ_S."""
        if self._reader is not None:
            await asyncio.to_thread(self._reader.join, READ_S)
        return bytes(self._kept).decode(errors="replace").strip()[-500:]

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while part := pipe.read(1 << 16):
                self._kept += part
                del self._kept[:-KEPT_STDERR]
                with contextlib.suppress(OSError):
                    os.write(2, part)


async def _unless_ended(asked: Coroutine[Any, Any, T], task: "asyncio.Task[None]") -> T:
    """Return what the server answers. Raises _Lost when the connection ends before."""
    call = asyncio.ensure_future(asked)
    try:
        await asyncio.wait({call, task}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise _Lost("the connection ended")
        return call.result()
    except _Lost:
        raise
    except Exception as error:  # the package of the environment raises errors of its own
        if task.done() or is_lost(error):
            raise _Lost(str(error) or type(error).__name__) from error
        raise
    finally:
        call.cancel()
        call.add_done_callback(lambda done: done.cancelled() or done.exception())


def is_lost(error: BaseException) -> bool:
    """Whether an error says that the connection is gone, and not that a tool failed."""
    code = getattr(getattr(error, "error", error), "code", None)
    libraries = ("anyio", "httpx", "httpx2", "httpcore", "httpcore2")
    from_transport = type(error).__module__.partition(".")[0] in libraries
    return code == CLOSED_CODE or from_transport or isinstance(error, OSError)


async def _open_session(server: McpServer, stack: AsyncExitStack, stderr: StderrTail) -> Any:
    """Connect to a server and return the session."""
    mcp = import_mcp(server)
    if server.url is None or server.command:
        program = str(Path(__file__).with_name("mcp_program.py"))
        arguments = ["-I", program, str(server.folder), *server.command]
        errors = stack.enter_context(stderr.open())
        if server.url is None:
            started = mcp.StdioServerParameters(
                command=sys.executable, args=arguments, env=dict(os.environ)
            )
            streams = await stack.enter_async_context(mcp.stdio_client(started, errlog=errors))
            return await _initialize(mcp, streams, stack)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
        )
        stack.push_async_callback(_end, process)
        return await _connect_when_up(mcp, server.url, stack, process)
    return await _initialize(mcp, await _http_streams(server.url, stack), stack)


async def _connect_when_up(
    mcp: Any, url: str, stack: AsyncExitStack, process: asyncio.subprocess.Process
) -> Any:
    """Connect to a server that is being started, as soon as something listens at its address."""
    parts = urlsplit(url)
    while process.returncode is None:
        try:
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        return await _initialize(mcp, await _http_streams(url, stack), stack)
    raise _Lost(f"its program ended with {process.returncode}")


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _http_streams(url: str, stack: AsyncExitStack) -> Any:
    """The streams of a server that speaks over HTTP. Its client uses the proxy of the sandbox."""
    module = importlib.import_module("mcp.client.streamable_http")
    connect = getattr(module, "streamable_http_client", None) or module.streamablehttp_client
    return await stack.enter_async_context(connect(url))


async def _initialize(mcp: Any, streams: Any, stack: AsyncExitStack) -> Any:
    session = await stack.enter_async_context(mcp.ClientSession(streams[0], streams[1]))
    await session.initialize()
    return session


def import_mcp(server: McpServer) -> Any:
    """Return the package `mcp`. Raises McpServerUnusable when the environment has none."""
    try:
        module = importlib.import_module("mcp")
    except ImportError as error:
        module, why = None, str(error)
    else:
        why = "another module has the name mcp"
    if module is None or not hasattr(module, "ClientSession"):
        raise McpServerUnusable(
            f"MCP server {server.name} needs the package mcp, which cannot be imported ({why}); add it "
            "to the dependencies in the rollout's pyproject.toml"
        )
    return module


async def _list_tools(session: Any, name: str) -> list[Any]:
    """All tools of a server. Raises McpServerUnusable when there are too many."""
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await (session.list_tools() if cursor is None else _next_page(session, cursor))
        found += page.tools
        if len(found) > MOST_SERVER_TOOLS:
            raise McpServerUnusable(
                f"MCP server {name} offers {len(found)} tools or more; offer at most "
                f"{MOST_SERVER_TOOLS}"
            )
        cursor = _either(page, "next_cursor", "nextCursor")
        if cursor is None:
            break
    return found


async def _next_page(session: Any, cursor: str) -> Any:
    types = importlib.import_module("mcp.types")
    return await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))


def _tool_of(connection: McpConnection, listed: Any) -> McpTool:
    """A listed tool. Raises McpServerUnusable when a model cannot call it."""
    schema = _either(listed, "input_schema", "inputSchema")
    place = f"MCP server {connection.name}: the tool {str(listed.name)[:80]!r}"
    if not NAME.fullmatch(listed.name):
        raise McpServerUnusable(
            f"{place} has a name that models cannot call; use 1 to 64 letters, digits, `_` and `-`"
        )
    size = len(json.dumps(schema))
    if size > LARGEST_SCHEMA:
        raise McpServerUnusable(
            f"{place} has a schema of {size} bytes; keep it below {LARGEST_SCHEMA}"
        )
    return McpTool(
        name=listed.name,
        description=(listed.description or "")[:LONGEST_DESCRIPTION],
        parameters=schema,
        connection=connection,
    )


def text_of(result: Any) -> str:
    """The text of a result. Other content than text is only named."""
    parts = []
    for part in result.content:
        text = getattr(part, "text", None)
        if text is None:
            text = getattr(getattr(part, "resource", None), "text", None)
        parts.append(text if isinstance(text, str) else f"[{getattr(part, 'type', 'content')}]")
    structured = _either(result, "structured_content", "structuredContent")
    if not parts and structured is not None:
        return json.dumps(structured, ensure_ascii=False)
    return "\n".join(parts)


def _either(value: Any, new: str, old: str) -> Any:
    """A field by its name in mcp 2.x or in mcp 1.x."""
    return getattr(value, new, None) if hasattr(value, new) else getattr(value, old, None)


def _first_cause(error: BaseException) -> BaseException:
    """The first error in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
