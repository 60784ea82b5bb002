"""A disk runs full under a run: it says so, waits, and goes on to the same bits once there is space."""

import json
import os
import signal
from pathlib import Path
from uuid import uuid4

import pytest

from infra.operations.local import embedded_postgres
from infra.operations.local.home import prepare as prepared
from tests.kit.disk import full, small_disk
from tests.kit.ledger import check
from tests.kit.platform import (
    GRADER_ONLY,
    Platform,
    eventually,
    final_adapter,
    make_workspace,
    platform,
    run_config,
)

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

STEPS = 12  # many, that the run is not over before a disk is full
CONFIG = run_config(advanced={"max_steps": STEPS})


def prepare(started: Platform, directory: Path) -> None:
    workspace = make_workspace(directory, {"rollouts/say/main.py": GRADER_ONLY})
    started.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
    started.upload("numbers")


def until_step(started: Platform, run: str, step: int) -> None:
    eventually(
        lambda: (started.info(run)["run"]["current_step"] or 0) >= step or None,
        within_s=120,
        what=f"step {step}",
    )


def test_full_disks_are_waited_for(tmp_path: Path) -> None:
    """First the blobs', then the database's; its server dies too, which nobody but the supervisor would
    start again."""
    home = tmp_path / "home"
    prepared(home)
    data = embedded_postgres.place_for(home).data.parent
    with small_disk(tmp_path / "disk", size_mb=64) as disk, small_disk(data, size_mb=256):
        environment = {"HEADRACE_BLOBS": (disk / "blobs").as_uri()}
        with platform(home, environment=environment) as started:
            prepare(started, tmp_path / "workspace")
            calm = started.wait(started.submit(CONFIG, workspace="w", name="calm"), "finished")
            run = started.submit(CONFIG, workspace="w", name="squeezed")
            until_step(started, run, 1)
            with full(disk):
                said = eventually(
                    lambda: started.info(run)["run"]["error"], within_s=60, what="the run says so"
                )
                assert said.startswith("waiting: the disk that holds")
                assert "free space on it" in said
                assert started.info(run)["run"]["status"] == "running"
            until_step(started, run, 2)
            with full(data):
                eventually(lambda: _refused(started), within_s=60, what="the API says so")
                os.kill(_postgres(home), signal.SIGKILL)
            info = started.wait(run, "finished")
            assert info["run"]["error"] is None
            check(started.events(run), steps=STEPS, groups=2, samples=4)
            assert final_adapter(info) == final_adapter(calm)


def _refused(started: Platform) -> bool | None:
    """Whether a write was answered with 503 and why."""
    made = started.api.post("/datasets", json={"name": uuid4().hex, "file_name": "x.jsonl"})
    if made.status_code != 503:
        return None
    assert made.headers["Retry-After"]
    assert "the database's disk is full; free space" in made.text, made.text
    return True


def _postgres(home: Path) -> int:
    return int(json.loads((home / "supervisor.json").read_text())["postgres_pid"])
