"""A disk runs full under a run: it says so, waits, and goes on to the same bits once there is space."""

from pathlib import Path

import pytest

from tests.kit.disk import fill, small_disk
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

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

STEPS = 4
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


def test_the_blobs_disk_is_full_and_then_is_not(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_mb=64) as disk:
        environment = {"HEADRACE_BLOBS": (disk / "blobs").as_uri()}
        with platform(tmp_path / "home", environment=environment) as started:
            prepare(started, tmp_path / "workspace")
            calm = started.wait(started.submit(CONFIG, workspace="w", name="calm"), "finished")
            run = started.submit(CONFIG, workspace="w", name="squeezed")
            until_step(started, run, 1)
            filler = fill(disk)
            waiting = eventually(
                lambda: started.info(run)["run"]["error"], within_s=60, what="it says so"
            )
            assert waiting.startswith("waiting: the disk that holds")
            assert "make room there" in waiting
            assert started.info(run)["run"]["status"] == "running"
            filler.unlink()
            info = started.wait(run, "finished")
            assert info["run"]["error"] is None
            check(started.events(run), steps=STEPS, groups=2, samples=4)
            assert final_adapter(info) == final_adapter(calm)
