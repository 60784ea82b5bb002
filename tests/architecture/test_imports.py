"""Directions of imports: the contracts of pyproject.toml, and what pure modules may not know."""

import ast
import subprocess
import sys
from pathlib import Path

from tests.kit.source import ROOT, imported_modules, modules, parse, relative

IMPURE = {"asyncio", "time", "random", "os", "secrets", "uuid", "threading", "socket"}
"""Modules that a decider must not import: it has no clock, no randomness and no IO."""


def deciders() -> list[Path]:
    """The modules that define `handle` or `evolve` as functions."""
    return [
        path
        for path in modules("consumers")
        if {n.name for n in parse(path).body if isinstance(n, ast.FunctionDef)}
        & {"handle", "evolve"}
    ]


def test_there_are_deciders() -> None:
    found = {
        path.relative_to(ROOT / "consumers").parts[0].removesuffix(".py") for path in deciders()
    }
    assert found >= {"sync", "run", "rollout", "grade", "learn", "checkpoint"}


def test_deciders_know_no_clock_no_chance_and_no_io() -> None:
    impure = {}
    for path in deciders():
        roots = {name.partition(".")[0] for name in imported_modules(path)}
        allowed = {"uuid"} if "from uuid import UUID" in path.read_text() else set()
        if found := (roots & IMPURE) - allowed:
            impure[relative(path)] = found
    assert impure == {}


def test_the_import_contracts_hold() -> None:
    program = "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def importers(*packages: str, outside: str) -> list[str]:
    """The modules of all roots but one that import one of these packages or a module below it."""
    return [
        f"{relative(path)} imports {name}"
        for path in modules()
        if path.relative_to(ROOT).parts[0] != outside
        for name in sorted(imported_modules(path))
        if any(name == package or name.startswith(f"{package}.") for package in packages)
    ]


def test_torch_stays_in_the_trainer() -> None:
    assert importers("torch", "transformers", "peft", "vllm", outside="trainer") == []


def test_clients_of_databases_and_buses_cryptography_and_forges_stay_in_infra() -> None:
    assert importers("asyncpg", "aiokafka", "boto3", "cryptography", "jwt", outside="infra") == []


def test_the_process_that_renews_a_lease_stays_small() -> None:
    program = "import sys, infra.spine.postgres.lease_renewer; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_the_telemetry_sdk_stays_in_infra() -> None:
    assert importers("opentelemetry.sdk", outside="infra") == []


def test_the_sdk_needs_the_standard_library_only() -> None:
    allowed = {*sys.stdlib_module_names, "headrace"}
    foreign = {
        relative(path): others
        for path in modules("headrace")
        if (others := {name.partition(".")[0] for name in imported_modules(path)} - allowed)
    }
    assert foreign == {}


def test_twin_an_import_is_found() -> None:
    assert importers("torch", outside="infra")
    assert importers("opentelemetry.sdk", outside="trainer")


def test_the_control_process_never_imports_torch() -> None:
    program = (
        "import sys, producers.serve;"
        "print(sorted({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
