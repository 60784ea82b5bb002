"""After a confined process has ended, nothing that it could write is opened by its path.

`infra/sandbox/written_trees.py` reaches such files from handles of their directories. So the modules
whose confined processes write files use that, and none of what follows a path through links.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("infra", "consumers", "producers", "trainer", "schemas")

WRITERS = {"infra/sandbox/environments/uv_process.py", "infra/git/confinement.py"}
"""The modules that give a confined process a place of this machine to write to."""

HANDLERS = (
    "infra/sandbox/environments/environments.py",
    "infra/sandbox/environments/removal.py",
    "infra/sandbox/environments/reserved_files.py",
    "infra/sandbox/environments/resolution.py",
    "infra/sandbox/environments/uv_process.py",
    "infra/git/commits.py",
    "infra/git/confinement.py",
    "infra/git/mirrors.py",
    "infra/git/storage.py",
)
"""The modules that handle what was written."""

FOLLOWING = {
    *("rmtree", "walk", "rglob", "copytree", "copyfile", "copy", "copy2", "move"),
    *("read_text", "read_bytes", "open", "stat", "exists", "is_dir", "is_file", "resolve"),
}
"""Calls that open what a path leads to, or that say what is there after links were followed."""

ALLOWED = {
    ("environments.py", "_open_locked", "open"): "a lock file beside the environments",
    ("environments.py", "_prepare", "is_dir"): "the directory of all environments",
    ("removal.py", "__init__", "open"): "a file beside the environments",
    ("removal.py", "_remove_unused", "open"): "the same",
    ("removal.py", "_last_use", "stat"): "the same",
    ("uv_process.py", "_beside", "read_text"): "our own code",
    ("uv_process.py", "find_uv", "resolve"): "the operator's program",
    ("uv_process.py", "find_uv", "stat"): "the same",
    ("uv_process.py", "find_uv", "is_file"): "our copy of it",
    ("uv_process.py", "find_uv", "copyfile"): "the same",
    ("uv_process.py", "_certificates", "read_bytes"): "the operator's file",
    ("confinement.py", "_certificates", "read_bytes"): "the operator's file",
    ("confinement.py", "wrap", "exists"): "files that the command reads",
    ("confinement.py", "_own_ssh", "is_dir"): "the operator's directory",
    ("mirrors.py", "_config", "exists"): "our own file beside the workspaces",
    ("storage.py", "collect", "is_dir"): "the directory of all workspaces",
}


def calls(source: str) -> Iterator[tuple[str, str]]:
    """The calls in FOLLOWING, each with the function around it."""
    for outer in ast.walk(ast.parse(source)):
        if not isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(outer):
            if isinstance(node, ast.Attribute) and node.attr in FOLLOWING:
                yield outer.name, node.attr
            elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "open":
                yield outer.name, "open"


def test_nothing_that_was_written_is_opened_by_its_path() -> None:
    found = {
        (Path(name).name, function, call)
        for name in HANDLERS
        for function, call in calls((ROOT / name).read_text())
    }
    assert found - set(ALLOWED) == set(), "use infra/sandbox/written_trees.py"
    assert set(ALLOWED) - found == set(), "no longer there: remove it from ALLOWED"


def test_who_lets_a_confined_process_write_is_known() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for root in ROOTS
        for path in (ROOT / root).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", None) == "ConfinedCommand"
        and any(argument.arg == "writable" for argument in node.keywords)
    }
    assert found == WRITERS, "add its handlers to HANDLERS"


def test_twin_a_path_that_is_followed_is_found() -> None:
    source = "def f(env):\n    shutil.rmtree(env)\n    open(env)\n    return env.read_text()\n"
    assert set(calls(source)) == {("f", "rmtree"), ("f", "open"), ("f", "read_text")}
