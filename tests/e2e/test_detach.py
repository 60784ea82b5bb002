"""`headrace up --detach` comes back when there is somebody to do the work, not before."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kit.platform import platform_environment

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]


def headrace(environment: Mapping[str, str], *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "producers.cli.main", *arguments, "--json"],
        env=dict(environment),
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_it_returns_when_every_process_holds_its_lease(tmp_path: Path) -> None:
    environment = platform_environment(tmp_path / "home", {})
    headrace(environment, "up", "--detach")
    try:
        status = headrace(environment, "status")
    finally:
        headrace(environment, "down")
    children = {child["name"]: child for child in status["supervisor"]["children"]}
    assert set(children) == {"control", "worker", "serving"}
    leased = {worker["id"] for worker in status["workers"]}
    assert {child["worker"] for child in children.values()} <= leased
    assert [child["starts"] for child in children.values()] == [1, 1, 1]
