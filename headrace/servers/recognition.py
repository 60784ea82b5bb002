"""Tells from the text of an entry point that it is the program of a rollout server, or an environment
that is served as one.

The program is not run for that: it would serve, and never return.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from headrace.error_location import rollout_folder

OURS = frozenset({"AgentWorkflow", "Grader", "reward"})
MAKER = "create_rollout_server"
PORTS = frozenset({"_OSMOSIS_ROLLOUT_PORT", "ROLLOUT_PORT"})


Served = Literal["server", "environment"]


def served_kind(tree: ast.Module, path: Path) -> Served | None:
    """Return what an entry point is, or None if it serves nothing. Its pyproject.toml may say so.
    Otherwise it imports no workflow, grader or reward of ours. A server uses what makes one, or reads
    the port to serve. An environment imports `verifiers`."""
    match declared_kind(path):
        case "server":
            return "server"
        case "environment":
            return "environment"
        case str():
            return None
    if any(name in OURS for name in _sdk_names(tree)):
        return None
    if any(_shows_server(node) for node in ast.walk(tree)):
        return "server"
    return "environment" if any(_imports_verifiers(node) for node in ast.walk(tree)) else None


def declared_kind(path: Path) -> str | None:
    """Return `kind` in the table [tool.headrace] of the pyproject.toml of an entry point's rollout."""
    try:
        project = tomllib.loads((rollout_folder(path) / "pyproject.toml").read_text())
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


def _imports_verifiers(node: ast.AST) -> bool:
    match node:
        case ast.ImportFrom(module=str(module)):
            return module.partition(".")[0] == "verifiers"
        case ast.Import(names=names):
            return any(alias.name.partition(".")[0] == "verifiers" for alias in names)
        case _:
            return False


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
