"""An upload to a model hub is given up while the hub is away, and while it sends files."""

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.kit.model_hub import TOKEN, HubFault, model_hub
from tests.kit.platform import Platform, eventually, make_workspace, platform, run_config

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

DEADLINE_S = 60.0


def headrace(running: Platform, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "producers.cli.main", "model", "upload", *arguments],
        env=running.environment,
        capture_output=True,
        text=True,
        check=False,
    )


def newest_upload(running: Platform) -> dict[str, Any]:
    found: dict[str, Any] = running.get("/checkpoints/first@2/uploads")["uploads"][0]
    return found


def test_an_upload_is_cancelled_while_it_waits_and_while_it_runs(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "workspace")
    held, release = threading.Event(), threading.Event()

    def before(method: str, path: str) -> None:
        if method == "POST" and re.search("/commit/main$", path):
            held.set()
            release.wait(DEADLINE_S)

    with model_hub() as hub:
        hub.before = before
        hub.faults.append(HubFault("POST", "/repos/create$", 503, "closed", times=1000))
        with platform(tmp_path / "home", environment={"HF_ENDPOINT": hub.url}) as running:
            assert running.post("/workspaces", {"url": str(workspace), "name": "w"}).is_success
            running.upload("numbers")
            run = running.submit(run_config(advanced={"max_steps": 2}), workspace="w", name="first")
            running.wait(run, "finished")
            secret = {"value": TOKEN, "scope": "personal"}
            assert running.api.put("/secrets/HF_TOKEN", json=secret).is_success
            assert headrace(running, "first@2", "org/sums", "--no-wait").returncode == 0
            eventually(
                lambda: newest_upload(running)["waiting"], within_s=DEADLINE_S, what="it waits"
            )
            assert headrace(running, "first@2", "org/sums", "--cancel").returncode == 0
            ended = newest_upload(running)
            assert (ended["status"], ended["error"]) == ("failed", "the upload was cancelled")
            hub.faults.clear()
            assert headrace(running, "first@2", "org/sums", "--no-wait").returncode == 0
            assert held.wait(DEADLINE_S)
            assert headrace(running, "first@2", "org/sums", "--cancel").returncode == 0
            assert newest_upload(running)["error"] == "the upload was cancelled"
            release.set()
            hub.before = lambda method, path: None
            again = headrace(running, "first@2", "org/sums")
            assert again.returncode == 0, "an upload that was cancelled can be repeated"
            messages = [commit["message"] for commit in hub.commits_of("org/sums")]
            assert messages
            assert not [message for message in messages if ended["id"] in message]
