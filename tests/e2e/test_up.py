"""`headrace up`, `status`, `doctor`, `down` and watching, as a user types them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.operations.local.free_port import free_port
from tests.kit.platform import eventually, platform_environment

pytestmark = [pytest.mark.processes, pytest.mark.postgres]

SFT = """
[experiment]
model_path = "scratch:qwen3-tiny"
dataset = "numbers"
[advanced]
algorithm = "sft"
tuning = "full"
batch_size = 4
max_steps = 100000
"""


def _interruptible() -> None:
    """As from a terminal: what runs behind a shell's `&` is started deaf to SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Shell:
    """Runs `headrace` with a home and a port of its own."""

    def __init__(self, home: Path, port: int) -> None:
        self.home = home
        self.environment = platform_environment(home, {"HEADRACE_URL": f"http://127.0.0.1:{port}"})

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "producers.cli.main", *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_interruptible,
        )

    def __call__(self, *arguments: str) -> tuple[int, Any]:
        """Exit code, and the document printed on stdout (or on stderr when it failed)."""
        process = self.start(*arguments, "--json")
        out, err = process.communicate(timeout=360)
        text = out if process.returncode == 0 else err
        return process.returncode, json.loads(text.splitlines()[-1])


@pytest.fixture(scope="module")
def headrace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("up") / "home", free_port())
    code, document = shell("up", "--detach")
    assert code == 0, document
    yield shell
    code, document = shell("down")
    assert code == 0, document


def test_a_second_up_on_the_same_home_is_refused_naming_the_pid(headrace: Shell) -> None:
    _, status = headrace("status")
    code, document = headrace("up")
    assert code == 1
    assert document["error"]["code"] == "CONFLICT"
    assert f"pid {status['supervisor']['pid']}" in document["error"]["message"]


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, document = Shell(tmp_path / "home", port)("up", "--detach")
    assert code == 1
    assert f"port {port}" in document["error"]["message"]
    assert "HEADRACE_URL" in document["error"]["message"]


def test_status_and_doctor_find_a_running_platform_healthy(headrace: Shell) -> None:
    code, status = headrace("status")
    assert code == 0
    children = {child["name"] for child in status["supervisor"]["children"]}
    assert children == {"control", "worker", "serving"}
    assert headrace("doctor")[0] == 0


def test_a_killed_control_process_is_back_and_requests_go_through(headrace: Shell) -> None:
    _, status = headrace("status")
    pids = {c["name"]: c["pid"] for c in status["supervisor"]["children"]}
    os.kill(pids["control"], signal.SIGKILL)

    def back() -> bool | None:
        code, found = headrace("status")
        if code != 0:
            return None
        now = {c["name"]: c["pid"] for c in found["supervisor"]["children"]}
        return True if now["control"] != pids["control"] else None

    eventually(back, within_s=30, what="the control process is back")


@pytest.mark.torch
def test_sigint_while_watching_leaves_the_run_and_says_how_to_come_back(
    headrace: Shell, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"user_prompt": f"Say {n}", "ground_truth": str(n)}) for n in range(8)]
    rows.write_text("\n".join(lines) + "\n")
    assert headrace("dataset", "upload", str(rows), "--name", "numbers")[0] == 0
    config = tmp_path / "sft.toml"
    config.write_text(SFT)
    process = headrace.start("train", "submit", str(config), "--name", "long", "--watch")
    assert process.stdout is not None
    line = ""
    deadline = time.monotonic() + 180
    while "step 1/" not in line:
        assert time.monotonic() < deadline
        line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "headrace train watch long" in err
    assert headrace("train", "info", "long")[1]["run"]["status"] == "running"
    assert headrace("train", "stop", "long")[0] == 0
    code, info = headrace("train", "watch", "long")
    assert code == 0
    assert info["run"]["status"] == "stopped"
    assert info["checkpoints"][-1]["step"] == info["run"]["current_step"]


def test_the_home_is_private(headrace: Shell) -> None:
    assert headrace.home.stat().st_mode & 0o777 == 0o700
    assert (headrace.home / "token").stat().st_mode & 0o777 == 0o600
