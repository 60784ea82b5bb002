"""The source of the product, for tests of rules about code: each module is read and parsed once."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("schemas", "trainer", "infra", "consumers", "producers", "headrace")


@cache
def modules(*roots: str) -> tuple[Path, ...]:
    """The paths of all modules below these roots (default: of the product), sorted."""
    return tuple(sorted(path for root in roots or ROOTS for path in (ROOT / root).rglob("*.py")))


@cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a module. Nobody may change it."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module's syntax tree, from the outside inwards."""
    return tuple(ast.walk(parse(path)))


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """The names of the modules that a module imports anywhere in it."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return frozenset(found)


def relative(path: Path) -> str:
    """A path as it is written in messages: below the repository."""
    return str(path.relative_to(ROOT))
