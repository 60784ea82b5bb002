"""Pause, resume and stop, at step boundaries, without a bit of difference."""

from collections.abc import Iterator

import pytest

from tests.kit.ledger import check
from tests.kit.platform import (
    Platform,
    eventually,
    final_adapter,
    make_workspace,
    platform,
    run_config,
)
from tests.kit.prometheus import samples

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    root = tmp_path_factory.mktemp("control")
    workspace = make_workspace(root / "workspace")
    with platform(root / "home") as started:
        started.post("/workspaces", {"url": str(workspace), "name": "w"})
        started.upload("numbers")
        yield started


def at_step(running: Platform, run: str, step: int) -> None:
    def reached() -> bool | None:
        return True if (running.info(run)["run"]["current_step"] or 0) >= step else None

    eventually(reached, within_s=60, what=f"step {step}")


def test_pause_frees_the_workers_and_resume_ends_in_the_same_bits(running: Platform) -> None:
    config = run_config(advanced={"max_steps": 8})
    undisturbed = final_adapter(running.wait(running.submit(config, workspace="w"), "finished"))
    run = running.submit(config, workspace="w")
    at_step(running, run, 1)
    assert running.post(f"/runs/{run}/pause", {}).status_code == 200

    def paused() -> object | None:
        info = running.info(run)["run"]
        return info if info["phase"] == "paused" else None

    info = eventually(paused, within_s=60, what="the run is paused")
    assert isinstance(info, dict)
    assert info["status"] == "running"

    def freed() -> bool | None:
        effects = running.get("/status")["effects"]
        return True if all(lane["claimed"] == 0 for lane in effects.values()) else None

    eventually(freed, within_s=10, what="no worker holds anything of the paused run")
    assert running.post(f"/runs/{run}/resume", {}).status_code == 200
    info = running.wait(run, "finished")
    assert final_adapter(info) == undisturbed
    check(running.events(run), steps=8, groups=2, samples=4)


def test_stop_ends_with_a_final_checkpoint(running: Platform) -> None:
    config = run_config(advanced={"max_steps": 500}, checkpoints={"checkpoint_save_freq": 1000})
    run = running.submit(config, workspace="w")
    at_step(running, run, 3)
    _watched(running, run)
    assert running.post(f"/runs/{run}/stop", {}).status_code == 200
    info = running.wait(run, "stopped")
    assert [c["step"] for c in info["checkpoints"]] == [info["run"]["current_step"]]
    again = running.post(f"/runs/{run}/stop", {})
    assert again.status_code == 409
    assert "stopped" in again.json()["detail"]


def _watched(running: Platform, run: str) -> None:
    """Prometheus sees the run's last step: what each part of it took, its staleness, its speed."""
    name = running.info(run)["run"]["name"]
    metrics = samples(running.api.get(f"{running.url}/metrics").text)
    last = {key: value for (of, key), value in metrics["headrace_last_step"].items() if of == name}
    parts = {f"time/{part}_s" for part in ("generate", "grade", "wait", "learn", "publish")}
    assert parts <= set(last)
    assert last["time/learn_s"] > 0
    assert last["train/lag"] == 0, "the synchronous mode trains what the newest policy sampled"
    assert metrics["headrace_tokens_per_second"][name,] > 0
    assert metrics["headrace_workers"][()] >= 1
