"""A run is archived and restored while the control process is killed at every step of it. Another run
begins from its checkpoint meanwhile, a backup holds the archive, and then it verifies as before."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.kills import arm, fired_points, once
from tests.kit.platform import (
    GRADER_ONLY,
    Platform,
    eventually,
    final_adapter,
    make_workspace,
    platform,
    platform_environment,
    run_config,
    verify,
)

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

POINTS = once("archive.packed", "archive.removed", "archive.blobs_back", "archive.restored")
CONFIG = run_config(
    advanced={"max_steps": 3, "validation_dataset": "numbers"},
    checkpoints={"eval_interval": 3},
)


def killed_at(started: Platform, point: str, path: str) -> None:
    """One request, in which the control process kills itself."""
    assert point not in fired_points(started.home)

    def asked() -> bool | None:
        """Until consumers have read all of the run, the answer is 503."""
        try:
            answer = started.api.post(path, json={})
        except httpx.TransportError:
            return True
        assert answer.status_code == 503, answer.text
        return None

    eventually(asked, within_s=60, what=f"the control process dies at {point}")
    eventually(
        lambda: point in fired_points(started.home) or None, within_s=10, what=f"{point} fires"
    )


def verified(started: Platform, run: str) -> Any:
    found = verify(started, run)
    assert found["status"] == "verified", found
    return found["adapter_sha256"], found["steps"], found["checkpoints"]


def views(started: Platform, run: str) -> Any:
    sample = started.get(f"/runs/{run}/samples", limit=1)["samples"][0]["id"]
    return {
        "info": started.info(run),
        "samples": started.get(f"/runs/{run}/samples", limit=100),
        "logs": started.get(f"/runs/{run}/logs", limit=500),
        "trace": started.get(f"/runs/{run}/trace", sample=sample),
        "events": [e for e in started.events(run) if e["type"] != "rl.run.restored"],
    }


def archived(started: Platform) -> list[str]:
    return [run["name"] for run in started.get("/runs", archived="true")["runs"]]


def headrace(environment: Mapping[str, str], *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "producers.cli.main", *arguments, "--json"],
        env=dict(environment),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.kills
def test_kills_at_every_step_of_archiving_and_restoring_lose_nothing(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "workspace", {"rollouts/say/main.py": GRADER_ONLY})
    backup = tmp_path / "backup"
    with platform(tmp_path / "old", environment=arm(POINTS)) as started:
        started.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
        started.upload("numbers")
        run = started.submit(CONFIG, workspace="w", name="base")
        final = final_adapter(started.wait(run, "finished"))
        proof, before = verified(started, run), views(started, run)

        killed_at(started, "archive.packed", f"/runs/{run}/archive")
        assert archived(started) == []
        assert views(started, run) == before
        killed_at(started, "archive.removed", f"/runs/{run}/archive")
        eventually(lambda: archived(started) or None, within_s=30, what="it is listed")
        assert started.post(f"/runs/{run}/archive", {}).status_code == 200
        assert started.get("/runs")["runs"] == []

        child = run_config(experiment={"model_path": "base@last"}, advanced={"max_steps": 1})
        began = started.submit(child, workspace="w", name="child")
        started.wait(began, "finished")
        refused = started.api.delete(f"/runs/{run}")
        assert refused.status_code == 409
        assert "child" in refused.json()["detail"]
        taken = headrace(started.environment, "backup", str(backup))
        assert taken["faults"] == []

        killed_at(started, "archive.blobs_back", f"/runs/{run}/restore")
        assert archived(started) == ["base"]
        killed_at(started, "archive.restored", f"/runs/{run}/restore")
        eventually(lambda: (not archived(started)) or None, within_s=30, what="it is listed again")
        eventually(
            lambda: (views(started, run) == before) or None, within_s=30, what="all views are back"
        )
        assert verified(started, run) == proof
        sound = headrace(started.environment, "doctor", "--deep")
        assert (sound["ok"], sound["damages"]) == (True, [])

    elsewhere = platform_environment(tmp_path / "new", {})
    headrace(elsewhere, "restore", str(backup))
    with platform(tmp_path / "new") as second:
        assert archived(second) == ["base"]
        restored = eventually(
            lambda: _restored(second, run), within_s=60, what="consumers have read everything"
        )
        assert restored["archived_at"] is None
        assert verified(second, run) == proof
        assert final_adapter(second.info(run)) == final


def _restored(started: Platform, run: str) -> Any:
    answer = started.api.post(f"/runs/{run}/restore", json={})
    assert answer.status_code in (200, 503), answer.text
    return answer.json()["run"] if answer.status_code == 200 else None
