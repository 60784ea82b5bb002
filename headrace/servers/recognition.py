"""Tells from the text of an entry point that it is the program of a rollout server.

The program is not run for that: it would serve, and never return.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

OURS = frozenset({"AgentWorkflow", "Grader", "reward"})
MAKER = "create_rollout_server"
PORTS = frozenset({"_OSMOSIS_ROLLOUT_PORT", "ROLLOUT_PORT"})


def is_server(tree: ast.Module, path: Path) -> bool:
    """Whether an entry point is a rollout server: its pyproject.toml says so, or it uses what makes one,
    or reads the port to serve, and imports no workflow, grader or reward of ours."""
    declared = declared_kind(path)
    if declared is not None:
        return declared == "server"
    if any(name in OURS for name in _sdk_names(tree)):
        return False
    return any(_shows_server(node) for node in ast.walk(tree))


def declared_kind(path: Path) -> str | None:
    """Return `kind` in the table [tool.headrace] of the pyproject.toml of an entry point's rollout."""
    folder = next((place for place in path.parents if place.parent.name == "rollouts"), path.parent)
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        kind = project["tool"]["headrace"]["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kind if isinstance(kind, str) else None


def _sdk_names(tree: ast.Module) -> Iterator[str]:
    """The names that an entry point takes from the SDK."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "headrace":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "headrace":
            yield node.attr


def _shows_server(node: ast.AST) -> bool:
    match node:
        case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "osmosis_ai":
            return any(alias.name == MAKER for alias in node.names)
        case ast.Attribute(attr=name):
            return name == MAKER
        case ast.Constant(value=str(text)):
            return text in PORTS
        case _:
            return False
