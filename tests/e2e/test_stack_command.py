"""`make stack` and `make stack-down`: the real components and a process per consumer with its own
accounts, by one command."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.operations.local import data_directory
from infra.spine.postgres.pool import administering
from tests.kit.kafka import need_kafka
from tests.kit.ledger import check
from tests.kit.platform import ROOT, RunningServer, final_adapter, make_workspace, run_config
from tests.kit.postgres import need_programs
from tests.kit.s3 import need_s3
from tests.stack.accounts import SERVICES

pytestmark = [pytest.mark.processes, pytest.mark.postgres, pytest.mark.kafka, pytest.mark.s3]

CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "AWS_"))
}


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**CLEAN, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def exported(script: Path) -> dict[str, str]:
    """The environment of a shell that has sourced the file."""
    shell = f". {script} && env -0"
    told = subprocess.run(
        ["sh", "-c", shell], env=CLEAN, capture_output=True, text=True, check=True
    )
    pairs = (line.partition("=") for line in told.stdout.split("\0") if line)
    return {name: value for name, _, value in pairs}


async def database_users(url: str) -> set[str]:
    """The roles of the processes that are connected to the database."""
    async with administering(url) as owner:
        rows = await owner.fetch(
            "select distinct usename from pg_stat_activity"
            " where backend_type = 'client backend' and pid <> pg_backend_pid()"
        )
    return {row["usename"] for row in rows}


def train(stack: Path, environment: Mapping[str, str], scratch: Path) -> None:
    """A run from a commit to its last checkpoint."""
    started = RunningServer(stack / "home", environment["HEADRACE_URL"])
    with started.api:
        url = str(make_workspace(scratch / "workspace"))
        made = started.post("/workspaces", {"url": url, "name": "w"})
        assert made.status_code == 201, made.text
        started.upload("numbers")
        run = started.submit(run_config(), workspace="w")
        info = started.wait(run, "finished")
        check(started.events(run), steps=4, groups=2, samples=4)
        assert final_adapter(info)


def test_one_command_starts_it_all_and_another_stops_it(tmp_path: Path) -> None:
    need_kafka()
    need_programs()
    need_s3()
    stack = tmp_path / "stack"
    started = python("tests.stack", "up", "--detach", str(stack))
    try:
        assert started.returncode == 0, started.stderr
        environment = exported(stack / "env")
        assert (stack / "env").stat().st_mode & 0o077 == 0, "it holds secrets"
        status: Any = python("producers.cli.main", "status", "--json", **environment)
        assert status.returncode == 0, status.stderr
        children = json.loads(status.stdout)["supervisor"]["children"]
        names = {child["name"] for child in children}
        assert {"control", "run", "rollout", "grade", "learn", "checkpoint"} <= names
        train(stack, environment, tmp_path)
        users = asyncio.run(database_users(environment["HEADRACE_DATABASE_URL"]))
        assert users - {"postgres"} == {f"postgres_{service}" for service in SERVICES.values()}
        for name in SERVICES:
            said = (stack / "home" / "logs" / f"{name}.log").read_text()
            assert "connected to Kafka" in said, name
            assert "AuthorizationFailed" not in said, name
        again = python("tests.stack", "up", "--detach", str(stack))
        assert again.returncode == 1
        assert "make stack-down" in again.stderr
    finally:
        stopped = python("tests.stack", "down", str(stack))
    assert stopped.returncode == 0, stopped.stderr
    assert not (stack / "env").exists()
    down = python("tests.stack", "down", str(stack))
    assert (down.returncode, "no stack runs" in down.stderr) == (1, True)
    data_directory.remove(stack / "postgres")
