"""A program that becomes an MCP server: `python -I mcp_program.py WORKSPACE [COMMAND...]`.

With a command, it runs the command in the workspace. Without one, it serves the FastMCP object of
`mcp/main.py` over its standard input and output. The modules in `mcp/tools/` are imported too. It dies
with the process that started it.
"""

import ctypes
import importlib
import importlib.util
import io
import os
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1
SERVER_CLASSES = {"FastMCP", "MCPServer"}
PYTHONS = ("python", "python3")


class ProtocolOutput(io.TextIOWrapper):
    """Standard output for user code. What is printed goes to standard error, and only `buffer`, which
    the protocol uses, is the real standard output."""

    def __init__(self, real: int) -> None:
        super().__init__(os.fdopen(os.dup(2), "wb"), line_buffering=True)
        self._real = os.fdopen(real, "wb")

    @property
    def buffer(self) -> Any:
        return self._real


def main() -> None:
    workspace, command = Path(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(workspace)
    if command:
        _become(command)
    real = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = ProtocolOutput(real)
    find_server(workspace / "mcp").run(transport="stdio")


def _become(command: list[str]) -> None:
    """Run a command instead of this program. `python` is the interpreter of the rollout."""
    program = command[0]
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "/usr/bin:/bin")])
    found = sys.executable if program in PYTHONS else shutil.which(program, path=path)
    if found is None:
        sys.exit(f"there is no program {program!r}; name one that the rollout's environment has")
    os.execve(  # noqa: S606 - the author names the program, and it runs in the author's sandbox
        found, [found, *command[1:]], {**os.environ, "PATH": path}
    )


def find_server(folder: Path) -> Any:
    """Load `main.py` and the tools of a folder, and return its server. Exits with a text when there is
    none, or when there are two."""
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("main", folder / "main.py")
    if spec is None or spec.loader is None:
        sys.exit("mcp/main.py cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules["main"] = module
    spec.loader.exec_module(module)
    for path in sorted((folder / "tools").glob("*.py")):
        if path.stem != "__init__":
            importlib.import_module(f"tools.{path.stem}")
    servers = servers_in([module]) or servers_in(_modules_below(folder))
    if len(servers) != 1:
        sys.exit(f"mcp/main.py defines {len(servers)} FastMCP objects; define one")
    return servers[0]


def servers_in(modules: list[ModuleType]) -> list[Any]:
    """The FastMCP objects that modules name."""
    found = {
        id(value): value
        for module in modules
        for value in vars(module).values()
        if any(cls.__name__ in SERVER_CLASSES for cls in type(value).__mro__)
    }
    return list(found.values())


def _modules_below(folder: Path) -> list[ModuleType]:
    loaded = list(sys.modules.values())
    return [
        one
        for one in loaded
        if (file := getattr(one, "__file__", None)) and Path(file).is_relative_to(folder)
    ]


if __name__ == "__main__":
    main()
