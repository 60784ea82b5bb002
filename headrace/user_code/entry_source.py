"""Reads the text of an entry point without running it, and finds the errors that the text alone shows.

Only what is certain counts as an error here: classes that are written in the file by their names. The
module that the file becomes is examined too, by `headrace/user_code/discovery.py`.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from headrace.error_location import workspace_path

METHODS = {"AgentWorkflow": "run", "Grader": "grade"}


def find_problem(tree: ast.Module, path: Path) -> str | None:
    """Return what is wrong with the workflows and graders of an entry point, or None when its text
    shows no error."""
    file = workspace_path(path, path)
    for base, method in METHODS.items():
        if _assigns_attribute(tree, method):
            continue
        found = [(c, own) for c in _classes(tree, base) if (own := _method(c, method)) is not None]
        if len(found) > 1:
            named = ", ".join(f"{c.name} (line {c.lineno})" for c, _ in found)
            return f"{file}: there are two {base}s: {named}; keep one in this file"
        for written, own in found:
            if isinstance(own, ast.FunctionDef) and not own.decorator_list:
                return (
                    f"{file}:{own.lineno}: {written.name}.{method} must be async: "
                    f"write `async def {method}(self, ctx)`"
                )
    return None


def _classes(tree: ast.Module, base: str) -> Iterator[ast.ClassDef]:
    """The classes that certainly derive from the SDK's `base` and keep their names. They are written at
    the top of the file, without a decorator, and with names that are bound once."""
    imported = any(
        isinstance(line, ast.ImportFrom)
        and line.module == "headrace"
        and any(name.name == base and name.asname is None for name in line.names)
        for line in tree.body
    )
    bound = Counter(_bound_names(tree))
    if not imported or bound[base] != 1 or bound["*"]:
        return
    for line in tree.body:
        if isinstance(line, ast.ClassDef) and bound[line.name] == 1 and _is_plain(line, base):
            yield line


def _is_plain(written: ast.ClassDef, base: str) -> bool:
    named = any(isinstance(each, ast.Name) and each.id == base for each in written.bases)
    return named and not written.decorator_list and not written.keywords


def _method(written: ast.ClassDef, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The only definition of a method in a class, or None."""
    if Counter(_bound_names(written))[name] != 1:
        return None
    for line in written.body:
        if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef) and line.name == name:
            return line
    return None


def _assigns_attribute(tree: ast.Module, name: str) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == name and not isinstance(node.ctx, ast.Load)
        for node in ast.walk(tree)
    )


def _bound_names(tree: ast.AST) -> Iterator[str]:
    """All names that anything below `tree` binds or deletes, in whatever scope. `*` stands for the names
    that a module gives to another one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node is not tree:
                yield node.name
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
