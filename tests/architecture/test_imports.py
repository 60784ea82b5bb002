"""Directions of imports: the contracts of pyproject.toml, and what pure modules may not know."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

IMPURE = {"asyncio", "time", "random", "os", "secrets", "uuid", "threading", "socket"}
"""Modules that a decider must not import: it has no clock, no randomness and no IO."""


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def deciders() -> list[Path]:
    """The modules that define `handle` or `evolve` as functions."""
    found = []
    for path in sorted((ROOT / "consumers").rglob("*.py")):
        functions = {
            n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)
        }
        if functions & {"handle", "evolve"}:
            found.append(path)
    return found


def test_there_are_deciders() -> None:
    found = {
        path.relative_to(ROOT / "consumers").parts[0].removesuffix(".py") for path in deciders()
    }
    assert found >= {"sync", "run", "rollout", "grade", "learn", "checkpoint"}


@pytest.mark.parametrize("path", deciders(), ids=lambda path: str(path.relative_to(ROOT)))
def test_deciders_know_no_clock_no_chance_and_no_io(path: Path) -> None:
    roots = {name.partition(".")[0] for name in imported(path)}
    allowed = {"uuid"} if "from uuid import UUID" in path.read_text() else set()
    assert not (roots & IMPURE) - allowed


def test_the_import_contracts_hold() -> None:
    program = "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def heavy(root: str, names: set[str]) -> set[str]:
    """The files of a root that import one of these packages at all."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / root).rglob("*.py")
        if {name.partition(".")[0] for name in imported(path)} & names
    }


@pytest.mark.parametrize("root", ["schemas", "infra", "consumers", "producers", "headrace"])
def test_torch_stays_in_the_trainer(root: str) -> None:
    assert not heavy(root, {"torch", "transformers", "peft", "vllm"})


@pytest.mark.parametrize("root", ["schemas", "trainer", "consumers", "producers", "headrace"])
def test_database_and_bus_clients_stay_in_infra(root: str) -> None:
    found = heavy(root, {"asyncpg", "aiokafka", "boto3"})
    assert not found


@pytest.mark.parametrize("root", ["schemas", "trainer", "consumers", "producers", "headrace"])
def test_cryptography_and_forges_stay_in_infra(root: str) -> None:
    assert not heavy(root, {"cryptography", "jwt"})


@pytest.mark.parametrize("root", ["schemas", "trainer", "consumers", "producers", "headrace"])
def test_the_telemetry_sdk_stays_in_infra(root: str) -> None:
    for path in (ROOT / root).rglob("*.py"):
        assert not [name for name in imported(path) if name.startswith("opentelemetry.sdk")], path


def test_the_sdk_needs_the_standard_library_only() -> None:
    for path in (ROOT / "headrace").rglob("*.py"):
        roots = {name.partition(".")[0] for name in imported(path)}
        assert roots <= {*sys.stdlib_module_names, "headrace"}, path


def test_the_control_process_never_imports_torch() -> None:
    program = (
        "import sys, producers.serve;"
        "print(sorted({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
