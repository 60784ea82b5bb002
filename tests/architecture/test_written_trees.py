"""After a confined process has ended, nothing that it could write is opened by its path.

`infra/sandbox/written_trees.py` reaches such files from handles of their directories. So the folders
whose confined processes write files use that, and none of what follows a path through links.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("infra", "consumers", "producers", "trainer", "schemas", "headrace")

WRITERS = {
    "infra/sandbox/environments/uv_process.py",
    "infra/repositories/git/confinement.py",
    "infra/sandbox/levels/bubblewrap_options.py",
}
"""The modules that give a confined process a place of this machine to write to. The last one mounts it
for the others."""

HANDLERS = ("infra/sandbox/environments", "infra/repositories/git", "infra/repositories/forges")
"""The folders that handle what was written. A module that is added to them is checked too."""

INNER = {"run_confined", "prepared_folder", "run_git", "GitFiles", "trees_of", "fetch_alone"}
"""What runs confined processes, or gives away what they wrote. Only the handlers use it."""

EXEMPT = {
    "infra/sandbox/environments/interpreters.py": "the operator's Pythons, and our copies of them",
    "infra/repositories/git/login.py": "keys of ssh, which only we write",
    "infra/repositories/git/pipes.py": "directories that the operator allows, read as they are",
}
"""Modules of these folders that handle nothing that was written. They import none that does."""

FOLLOWING = {
    *("rmtree", "walk", "fwalk", "rglob", "glob", "iglob", "scandir", "listdir", "iterdir"),
    *("copytree", "copyfile", "copy", "copy2", "move", "make_archive", "unpack_archive"),
    *("read_text", "read_bytes", "write_text", "write_bytes", "open", "touch", "truncate"),
    *("stat", "exists", "is_dir", "is_file", "isdir", "isfile", "getsize", "samefile", "access"),
    *("resolve", "realpath", "chmod", "chown", "chdir", "chroot"),
    *("create_subprocess_exec", "create_subprocess_shell", "subprocess", "system", "Popen"),
}
"""Calls that open or change what a path leads to, that say what is there after links were followed, and
those of programs that could do so."""

ENVIRONMENTS, GIT, FORGES = HANDLERS
ALLOWED = {
    (f"{ENVIRONMENTS}/environments.py", "_open_locked", "open"): "a lock file beside them",
    (f"{ENVIRONMENTS}/environments.py", "_prepare", "is_dir"): "the directory of all environments",
    (f"{ENVIRONMENTS}/environments.py", "_prepare", "chmod"): "the same",
    (f"{ENVIRONMENTS}/environments.py", "_settle", "chmod"): "our directory around it",
    (f"{ENVIRONMENTS}/environments.py", "unpack", "chmod"): "the same",
    (f"{ENVIRONMENTS}/environments.py", "run_python", "chmod"): "the same",
    (f"{ENVIRONMENTS}/environments.py", "_get_for_tool", "resolve"): "of versions, not of a path",
    (f"{ENVIRONMENTS}/environments.py", "_read_versions", "read_bytes"): "a file beside them, ours",
    (f"{ENVIRONMENTS}/environments.py", "_write_versions", "write_text"): "the same",
    (f"{ENVIRONMENTS}/environments.py", "_install", "write_text"): "before a process could write",
    (f"{ENVIRONMENTS}/environments.py", "get", "touch"): "a file beside the environments",
    (f"{ENVIRONMENTS}/index_relay.py", "listen", "chmod"): "the relay's own socket",
    (f"{ENVIRONMENTS}/removal.py", "__init__", "open"): "a file beside the environments",
    (f"{ENVIRONMENTS}/removal.py", "_remove_unused", "open"): "the same",
    (f"{ENVIRONMENTS}/removal.py", "_last_use", "stat"): "the same",
    (f"{ENVIRONMENTS}/removal.py", "remove_partials", "glob"): "the directory of all environments",
    (f"{ENVIRONMENTS}/removal.py", "_remove_left_over", "glob"): "the same",
    (f"{ENVIRONMENTS}/removal.py", "_remove_unused_copies", "glob"): "the same",
    (f"{ENVIRONMENTS}/removal.py", "_environments", "glob"): "the same",
    (f"{ENVIRONMENTS}/resolution.py", "write_inputs", "write_text"): "before a process could write",
    (f"{ENVIRONMENTS}/resolution.py", "_write_lock", "write_text"): "the same",
    (f"{ENVIRONMENTS}/uv_process.py", "_beside", "read_text"): "our own code",
    (f"{ENVIRONMENTS}/uv_process.py", "find_uv", "resolve"): "the operator's program",
    (f"{ENVIRONMENTS}/uv_process.py", "find_uv", "stat"): "the same",
    (f"{ENVIRONMENTS}/uv_process.py", "find_uv", "is_file"): "our copy of it",
    (f"{ENVIRONMENTS}/uv_process.py", "find_uv", "copyfile"): "the same",
    (f"{ENVIRONMENTS}/uv_process.py", "find_uv", "chmod"): "the same",
    (f"{ENVIRONMENTS}/uv_process.py", "_certificates", "read_bytes"): "the operator's file",
    (f"{ENVIRONMENTS}/uv_process.py", "prepared_folder", "chmod"): "a new directory",
    (f"{ENVIRONMENTS}/uv_process.py", "prepared_folder", "chown"): "the same",
    (f"{GIT}/confinement.py", "_certificates", "read_bytes"): "the operator's file",
    (f"{GIT}/confinement.py", "wrap", "exists"): "files that the command reads",
    (f"{GIT}/confinement.py", "_own_ssh", "is_dir"): "the operator's directory",
    (f"{FORGES}/api.py", "post", "open"): "the client of a forge",
    (f"{FORGES}/github.py", "_send", "getattr"): "an answer over HTTP",
    (f"{GIT}/mirrors.py", "_config", "exists"): "our own file beside the workspaces",
    (f"{GIT}/mirrors.py", "_config", "write_text"): "the same",
    (f"{GIT}/process.py", "_start", "create_subprocess_exec"): "git, in its sandbox",
    (f"{GIT}/process.py", "_start", "subprocess"): "its type",
    (f"{GIT}/process.py", "_talk", "subprocess"): "its type",
    (f"{GIT}/process.py", "_end", "subprocess"): "its type",
    (f"{GIT}/process.py", "_kill_group", "subprocess"): "its type",
    (f"{GIT}/process.py", "_give", "subprocess"): "its type",
    (f"{GIT}/process.py", "_take", "subprocess"): "its type",
    (f"{GIT}/process.py", "_errors", "subprocess"): "its type",
    (f"{GIT}/storage.py", "_by_use", "glob"): "our directory of a workspace",
    (f"{GIT}/storage.py", "_remove_partials", "glob"): "the same",
    (f"{GIT}/storage.py", "collect", "is_dir"): "the directory of all workspaces",
    (f"{GIT}/storage.py", "collect", "iterdir"): "the same",
    (f"{GIT}/tree.py", "__init__", "open"): "an archive that we write into memory",
    (f"{GIT}/urls.py", "check_directory", "is_dir"): "a directory that the operator allows",
}


def find_following(source: str) -> Iterator[tuple[str, str]]:
    """Find what is in FOLLOWING, or hides it: each with the function around it, or `module`."""

    def look(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                function = name
            case ast.Attribute(attr=name) | ast.Call(func=ast.Name(id="open" | "getattr" as name)):
                if name in FOLLOWING or name == "getattr":
                    yield function, name
            case ast.ImportFrom(module=module, names=names):
                if module in ("os", "os.path", "shutil", "glob", "subprocess", "io", "pathlib"):
                    yield from ((function, n.name) for n in names if n.name != "Path")
            case ast.Import(names=names):
                yield from ((function, n.name) for n in names if n.name == "subprocess")
        for child in ast.iter_child_nodes(node):
            yield from look(child, function)

    return look(ast.parse(source), "module")


def may_let_write(source: str) -> bool:
    """Whether a module lets a confined process write to a place of this machine, in any of the ways in
    which that can be said."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=func, args=args, keywords=keywords):
                name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", None)
                names = {keyword.arg for keyword in keywords}
                if "writable" in names:
                    return True
                if name == "ConfinedCommand" and (len(args) > 5 or None in names):
                    return True
            case ast.alias(name="ConfinedCommand", asname=str()):
                return True
            case ast.Constant(value="--bind" | "--bind-try" | "--dev-bind-try"):
                return True
    return False


def names_in(source: str) -> set[str]:
    """The names that a module uses, imports or reaches through another one."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                found.add(name)
    return found


def modules(*folders: str) -> dict[str, str]:
    """The product's modules below these folders, each with its text."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def test_nothing_that_was_written_is_opened_by_its_path() -> None:
    found = {
        (name, function, call)
        for name, source in modules(*HANDLERS).items()
        if name not in EXEMPT
        for function, call in find_following(source)
    }
    assert found - set(ALLOWED) == set(), "use infra/sandbox/written_trees.py"
    assert set(ALLOWED) - found == set(), "no longer there: remove it from ALLOWED"


def test_exempt_modules_run_no_confined_process() -> None:
    for name in EXEMPT:
        assert names_in((ROOT / name).read_text()).isdisjoint(INNER), name


def test_modules_that_let_a_confined_process_write_are_known() -> None:
    found = {name for name, source in modules(*ROOTS).items() if may_let_write(source)}
    assert found == WRITERS, "add its folder to HANDLERS"


def test_only_the_handlers_run_what_writes() -> None:
    others = {name for name, text in modules(*ROOTS).items() if names_in(text) & INNER}
    assert {name for name in others if not name.startswith(HANDLERS)} == set()


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("def f(env):\n    shutil.rmtree(env)", ("f", "rmtree")),
        ("async def f(env):\n    open(env)", ("f", "open")),
        ("class A:\n    def f(self):\n        return self.env.read_text()", ("f", "read_text")),
        ("SIZE = PLACE.stat().st_size", ("module", "stat")),
        ("from shutil import rmtree as remove", ("module", "rmtree")),
        ("from os import open", ("module", "open")),
        ("import subprocess as s", ("module", "subprocess")),
        ("def f(env):\n    getattr(os, 'op' + 'en')(env)", ("f", "getattr")),
        ("def f(env):\n    g = env.chmod\n    g(0)", ("f", "chmod")),
    ],
)
def test_twin_a_path_that_is_followed_is_found(source: str, call: tuple[str, str]) -> None:
    assert call in set(find_following(source))


@pytest.mark.parametrize(
    "source",
    [
        "ConfinedCommand([], env={}, cwd=p, writable=(p,))",
        "level.ConfinedCommand(a, e, c, r, k, w)",
        "ConfinedCommand(**values)",
        "replace(command, writable=(p,))",
        "from infra.sandbox.levels.level import ConfinedCommand as C",
        "arguments = ('--bind', p, p)",
    ],
)
def test_twin_a_new_writer_is_found(source: str) -> None:
    assert may_let_write(source)
    assert not may_let_write("ConfinedCommand([], env={}, cwd=p, readable=(p,))")
