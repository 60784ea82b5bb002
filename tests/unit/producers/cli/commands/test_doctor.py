"""The faults that `headrace doctor` finds, and the remedy that it names for each."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.kit.hub import hub
from tests.unit.producers.cli.conftest import FakeServer, Ran, Run


def check(ran: Ran, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in ran.document["checks"] if c["name"] == name)
    return found


@pytest.fixture
def free_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request leaves this machine."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HEADRACE_PACKAGE_INDEX", "http://127.0.0.1:9/simple")


@pytest.mark.usefixtures("free_port")
def test_a_machine_with_everything_is_fine_without_a_server(headrace: Run) -> None:
    ran = headrace("doctor", "--json")
    assert ran.code == 0, ran.err
    assert ran.document["ok"] is True
    assert check(ran, "server")["ok"] is None
    assert "python" in headrace("doctor").out
    assert "127.0.0.1:9 cannot be reached" in str(check(ran, "package index")["detail"])
    assert "3.1" in str(check(ran, "rollout Pythons")["detail"])


@pytest.mark.usefixtures("free_port")
def test_a_missing_program_is_named_with_advice(
    headrace: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ran = headrace("doctor", "--json")
    assert ran.code == 1
    assert check(ran, "git")["ok"] is False
    assert "install git" in str(check(ran, "git")["fix"])
    assert "git" in ran.error["message"]
    assert "compiler" not in ran.error["message"], "it works without one"
    assert check(ran, "C compiler")["ok"] is None
    assert "apt install gcc" in str(check(ran, "C compiler")["detail"])


def test_an_open_home_is_named(headrace: Run, server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o755)
    found = check(headrace("doctor", "--json"), "home")
    assert found["ok"] is False
    assert "open to other users" in found["detail"]
    assert "chmod 700" in found["fix"]


def test_a_key_file_that_cannot_be_used_is_named(
    headrace: Run, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    assert check(headrace("doctor", "--json"), "secret key")["ok"] is None
    (home / "secret.key").write_text("gibberish")
    found = check(headrace("doctor", "--json"), "secret key")
    assert found["ok"] is False
    assert "HEADRACE_SECRET_KEY" in found["fix"]
    assert "gibberish" not in str(found)
    (home / "secret.key").write_text("ab" * 32)
    assert check(headrace("doctor", "--json"), "secret key")["ok"] is True
    monkeypatch.setenv("HEADRACE_SECRET_KEY", "cd" * 32)
    found = check(headrace("doctor", "--json"), "secret key")
    assert found["detail"] == "in HEADRACE_SECRET_KEY"


def test_a_stranger_on_the_port_is_named(
    headrace: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        url = f"http://127.0.0.1:{stranger.getsockname()[1]}"
        monkeypatch.setenv("HEADRACE_URL", url)
        monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
        monkeypatch.setattr("producers.cli.client.Client.ready", lambda _: False)
        found = check(headrace("doctor", "--json"), "server")
    assert found["ok"] is False
    assert "HEADRACE_URL" in str(found["fix"])


@pytest.mark.parametrize(("age", "ok"), [(0.1, True), (120.0, False)])
def test_the_age_of_the_horizon_is_judged(
    headrace: Run, monkeypatch: pytest.MonkeyPatch, server: FakeServer, age: float, ok: bool
) -> None:
    monkeypatch.setattr("producers.cli.client.Client.ready", lambda _: True)
    holder = "the transaction of pid 42 (psql, user ann)"
    server.answer("GET", "/status", {"horizon_age_s": age, "horizon_holders": [holder]})
    found = check(headrace("doctor", "--json"), "server")
    assert found["ok"] is ok
    assert ok or holder in str(found["fix"])


def test_a_server_that_refuses_the_key_is_not_said_to_be_absent(
    headrace: Run, monkeypatch: pytest.MonkeyPatch, server: FakeServer
) -> None:
    monkeypatch.setattr("producers.cli.client.Client.ready", lambda _: True)
    problem = {"title": "Unauthorized", "detail": "the API key is wrong", "code": "UNAUTHORIZED"}
    server.answer("GET", "/status", problem, status=401)
    ran = headrace("doctor", "--json")
    for name in ("read model", "work"):
        assert check(ran, name)["ok"] is None
        assert check(ran, name)["detail"].startswith("unknown: the API key is wrong")


@pytest.mark.parametrize("what", ["stalled", "effect"])
def test_work_without_progress_is_an_alarm(
    headrace: Run, monkeypatch: pytest.MonkeyPatch, server: FakeServer, what: str
) -> None:
    monkeypatch.setattr("producers.cli.client.Client.ready", lambda _: True)
    server.answer("GET", "/status", {"waiting_for": [{"what": what, "message": "TrainStep ..."}]})
    found = check(headrace("doctor", "--json"), "work")
    assert found["ok"] is (what != "stalled")
    assert found["fix"] == ("TrainStep ..." if what == "stalled" else None)


def test_passwords_are_not_shown(
    headrace: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_URL", "http://user:hunter2@127.0.0.1:9")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    for arguments in (("doctor", "--json"), ("doctor",), ("status",), ("status", "--json")):
        ran = headrace(*arguments)
        assert "hunter2" not in ran.out + ran.err, arguments
    assert "user:***@127.0.0.1:9" in str(check(headrace("doctor", "--json"), "server")["detail"])


def fake_nvidia_smi(directory: Path, script: str) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.usefixtures("free_port")
def test_the_gpu_is_looked_at(
    headrace: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{tmp_path}:{path}")
    fake_nvidia_smi(tmp_path, "echo 'NVIDIA H100, 81559 MiB, 80000 MiB, 550.1'")
    found = check(headrace("doctor", "--json"), "GPU")
    assert found["ok"] is True
    assert found["detail"] == "NVIDIA H100, 80000 MiB of 81559 MiB free, driver 550.1"
    fake_nvidia_smi(tmp_path, "echo 'Driver/library version mismatch'; exit 18")
    found = check(headrace("doctor", "--json"), "GPU")
    assert found["ok"] is not True
    assert "Driver/library version mismatch" in str(found["detail"])


@pytest.mark.usefixtures("free_port")
def test_memory_is_what_the_container_leaves(
    headrace: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    8388608 kB\n")
    monkeypatch.setattr("producers.cli.machine.MEMINFO", meminfo)
    monkeypatch.setattr("producers.cli.machine.CGROUP", tmp_path)
    found = check(headrace("doctor", "--json"), "memory")
    assert found["ok"] is True
    assert str(found["detail"]).startswith("8.0 GiB available")
    (tmp_path / "memory.max").write_text(f"{1 << 29}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 28}\n")
    ran = headrace("doctor", "--json")
    assert check(ran, "memory")["ok"] is False
    assert str(check(ran, "memory")["detail"]).startswith("256.0 MiB available")
    assert ran.code == 1


@pytest.mark.usefixtures("free_port")
def test_the_hub_is_asked_and_not_needed(headrace: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub() as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        found = check(headrace("doctor", "--json"), "model hub")
        assert found["ok"] is True
        assert url in str(found["detail"])
    ran = headrace("doctor", "--json")
    assert ran.code == 0, "a machine may be without a hub"
    assert check(ran, "model hub")["ok"] is None
    assert "cannot be reached" in str(check(ran, "model hub")["detail"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in str(check(headrace("doctor", "--json"), "model hub")["detail"])


@pytest.mark.usefixtures("free_port")
def test_a_git_that_is_too_old_is_named(headrace: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.repositories.git.process.OLDEST", (99, 1))
    found = check(headrace("doctor", "--json"), "git")
    assert found["ok"] is False
    assert "install git 99.1 or newer" in found["fix"]
    assert "git version" in found["detail"]
