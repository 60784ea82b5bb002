"""Finds what an entry point defines: at most one workflow, at most one grader, reward functions, and
tools.

An entry point is first read without running it (`headrace/user_code/entry_source.py`). Every error names
the file and the line, as a compiler would.
"""

import ast
import inspect
import linecache
import sys
import types
from abc import ABCMeta
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.error_location import describe, own_frames, tree_of, workspace_path
from headrace.grading import Grader
from headrace.rewards import is_reward
from headrace.tools.function_tool import FunctionTool, marked_tool
from headrace.tools.mcp_client import McpServerUnusable, with_servers
from headrace.tools.mcp_config import (
    InvalidMcpConfig,
    McpServer,
    chosen_servers,
    mcp_servers,
)
from headrace.tools.tool_set import ToolSet, UnusableTools, offered_tools
from headrace.user_code.entry_source import find_problem
from headrace.workflow import AgentWorkflow

NEW = inspect.getattr_static(object, "__new__")


class EntryPointError(Exception):
    """The entry point cannot be used; the message says where and why."""


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of an entry point. Raises EntryPointError with file and line."""
    try:
        return ast.parse(path.read_text(), str(path))
    except SyntaxError as error:
        raise _syntax_error(error, path) from error
    except (ValueError, RecursionError, MemoryError) as error:
        message = f"{workspace_path(path, path)}: {type(error).__name__}: {error}"
        raise EntryPointError(message) from error


def load(path: Path) -> types.ModuleType:
    """Run an entry point as a module and return the module. Raises EntryPointError with file and line
    when it does not load, and before it runs when its text alone shows an error."""
    module = types.ModuleType("rollout")
    module.__file__ = str(path)
    sys.modules["rollout"] = module
    try:
        tree = parse(path)
        if problem := find_problem(tree, path):
            raise EntryPointError(problem)
        exec(compile(tree, str(path), "exec"), module.__dict__)  # noqa: S102 - this is what we are for
    except EntryPointError:
        raise
    except SyntaxError as error:
        raise _syntax_error(error, path) from error
    except BaseException as error:  # user code raises whatever it likes, SystemExit too
        message = f"{_place(error, path)}: {describe(error, path)}"
        raise EntryPointError(message) from error
    return module


def workflow_of(module: types.ModuleType) -> type[AgentWorkflow] | None:
    """Return the AgentWorkflow class of a module, or None. A module with tools and no such class has
    AgentWorkflow itself, which runs the built-in loop. Raises EntryPointError for two, or for a `run`
    that is not async."""
    found = _only(module, AgentWorkflow, "run")
    if found is not None:
        return found
    has_tools = _marked_tools(vars(module)) or servers_of(module, AgentWorkflow)
    return AgentWorkflow if has_tools else None


def tools_of(module: types.ModuleType, workflow: type[AgentWorkflow]) -> ToolSet:
    """Return the tools of a workflow: its list `tools`, or the marked functions of the module, and its
    marked methods. Raises EntryPointError when they cannot be offered."""
    methods = {name: getattr(workflow, name, None) for name in dir(workflow)}
    try:
        listed = workflow.tools
        own = _marked_tools(vars(module)) if listed is None else offered_tools(listed)
        found = {id(one): one for one in (*own, *_marked_tools(methods))}
        return ToolSet(found.values())
    except UnusableTools as error:
        path = Path(module.__file__ or "?")
        place = f"{workspace_path(path, path)}:{_line(workflow) or 1}"
        raise EntryPointError(f"{place}: {workflow.__name__}.tools: {error}") from error


def servers_of(module: types.ModuleType, workflow: type[AgentWorkflow]) -> list[McpServer]:
    """Return the MCP servers of the workspace that a workflow uses: those in its list `mcp`, or all if
    it runs the built-in loop. Raises EntryPointError when they cannot be used."""
    path = Path(module.__file__ or "?")
    if workflow.mcp is None and workflow.run is not AgentWorkflow.run:
        return []
    try:
        servers = mcp_servers(tree_of(path))
        return servers if workflow.mcp is None else chosen_servers(servers, workflow.mcp)
    except InvalidMcpConfig as error:
        raise EntryPointError(f"{workspace_path(path, path)}: {error}") from error


async def open_tools(module: types.ModuleType, workflow: type[AgentWorkflow]) -> ToolSet:
    """Start the MCP servers of a workflow, and return all of its tools. Raises EntryPointError."""
    functions, servers = tools_of(module, workflow), servers_of(module, workflow)
    try:
        return await with_servers(functions, servers)
    except (McpServerUnusable, UnusableTools) as error:
        raise EntryPointError(str(error)) from error


def _marked_tools(names: Mapping[str, object]) -> list[FunctionTool]:
    return [found for value in names.values() if (found := marked_tool(value)) is not None]


def grader_of(module: types.ModuleType) -> type[Grader] | None:
    """Return the Grader class of a module, or None. Raises EntryPointError for two, or for a `grade`
    that is not async."""
    return _only(module, Grader, "grade")


def rewards_of(module: types.ModuleType) -> dict[str, Callable[..., object]]:
    """Return the reward functions of a module by name."""
    return {name: value for name, value in vars(module).items() if is_reward(value)}


def _syntax_error(error: SyntaxError, path: Path) -> EntryPointError:
    where = workspace_path(Path(error.filename or str(path)), path)
    return EntryPointError(f"{where}:{error.lineno}: SyntaxError: {error.msg}")


def _only(module: types.ModuleType, base: type, method: str) -> type | None:
    found = {
        id(value): value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    classes = list(found.values())
    # A base class that leaves the method to its subclasses is abstract, and not a second candidate.
    classes = [c for c in classes if getattr(c, method) is not getattr(base, method)] or classes
    # A class of this file comes before those that it imports, such as the one that it derives from.
    classes = [c for c in classes if c.__module__ == module.__name__] or [
        c for c in classes if not any(c is not d and issubclass(d, c) for d in classes)
    ]
    path = Path(module.__file__ or "?")
    file = workspace_path(path, path)
    if len(classes) > 1:
        named = ", ".join(_name_with_place(c, module) for c in classes)
        raise EntryPointError(
            f"{file}: there are two {base.__name__}s: {named}; keep one in this file"
        )
    if not classes:
        return None
    function = getattr(classes[0], method)
    if not inspect.iscoroutinefunction(function):
        raise EntryPointError(
            f"{file}:{_line(function)}: {classes[0].__name__}.{method} must be async: "
            f"write `async def {method}(self, ctx)`"
        )
    if problem := signature_problem(classes[0], method, path):
        raise EntryPointError(problem)
    return classes[0]


def _name_with_place(cls: type, module: types.ModuleType) -> str:
    place = "" if cls.__module__ == module.__name__ else f"{cls.__module__}, "
    return f"{cls.__name__} ({place}line {_line(cls)})"


def named_place(owner: type, method: str, entry: Path) -> str:
    """Return the name of a method with its file and line, or only its name if the workspace does not
    contain it."""
    place = _definition(inspect.getattr_static(owner, method, None), entry)
    name = f"{owner.__name__}.{method}"
    return f"{name} ({place})" if place else name


def signature_problem(owner: type, method: str, entry: Path) -> str | None:
    """Return why `owner().method(ctx)` cannot be called, or None if it can. Only plain functions are
    examined."""
    file = workspace_path(entry, entry)
    made = inspect.getattr_static(owner, "__init__", None)
    is_plain = type(owner) in (type, ABCMeta) and inspect.getattr_static(owner, "__new__") is NEW
    if is_plain and (why := _refusal(made, 1)):
        return (
            f"{_definition(made, entry) or file}: {owner.__name__} cannot be made without arguments "
            f"({why}); give each argument of `__init__` a default"
        )
    function = inspect.getattr_static(owner, method, None)
    if why := _refusal(function, 2):
        return (
            f"{_definition(function, entry) or file}: {owner.__name__}.{method} cannot be called with "
            f"a context ({why}); write `async def {method}(self, ctx)`"
        )
    return None


def _refusal(function: object, num_arguments: int) -> str | None:
    """Why a function cannot be called with so many arguments, or None if it can."""
    if not isinstance(function, types.FunctionType):
        return None
    try:
        signature = inspect.signature(function, follow_wrapped=False)
        signature.bind(*[None] * num_arguments)
    except TypeError as error:
        return str(error)
    except ValueError:  # it has no signature
        return None
    return None


def _definition(function: object, entry: Path) -> str | None:
    if not isinstance(function, types.FunctionType):
        return None
    file = Path(function.__code__.co_filename)
    if not file.is_relative_to(tree_of(entry)):
        return None
    return f"{workspace_path(file, entry)}:{function.__code__.co_firstlineno}"


def _line(thing: object) -> int:
    try:
        return inspect.getsourcelines(thing)[1]  # type: ignore[arg-type]  # what has no lines raises
    except (OSError, TypeError):
        return 0


def _place(error: BaseException, path: Path) -> str:
    """Return the innermost frame of the workspace's own code in a traceback, as text."""
    linecache.checkcache()
    own = own_frames(error, path)
    if not own:
        return f"{workspace_path(path, path)}:1"
    return f"{workspace_path(Path(own[0].filename), path)}:{own[0].lineno}"
