"""vLLM on the learner's machine: its settings, and that the supervisor starts, restarts and stops
it in order."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from infra.operations.local.free_port import free_port
from infra.operations.local.supervisor import child_specs
from infra.settings.settings import BadSetting, Settings
from infra.settings.vllm import RESERVE
from tests.kit.platform import eventually

ROOT = Path(__file__).parents[4]
ASKED = {"HEADRACE_SAMPLER": "vllm", "HEADRACE_VLLM_MODEL": "qwen3-tiny"}


def test_a_server_of_our_own_is_asked_like_any_other() -> None:
    vllm = Settings.load({**ASKED, "HEADRACE_VLLM_PORT": "9100"}).vllm
    assert vllm is not None
    assert vllm.urls == ("http://127.0.0.1:9100",)
    named = Settings.load({"HEADRACE_SAMPLER": "vllm=http://a:1"}).vllm
    assert named is not None
    assert named.server is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"HEADRACE_VLLM_MODEL": ""},
            "HEADRACE_VLLM_MODEL holds ''; it may hold the model to serve",
        ),
        ({"HEADRACE_VLLM_GPU_PERCENT": "95"}, "a whole number from 5 to 90"),
        ({"HEADRACE_VLLM_MAX_LORA_RANK": "12"}, "one of 1, 8, 16, 32, 64, 128, 256, 320, 512"),
        (
            {"HEADRACE_VLLM_TUNING": "dora"},
            "HEADRACE_VLLM_TUNING holds 'dora'; it may hold lora or full",
        ),
        ({"HEADRACE_VLLM_ARGUMENTS": "--x 'y"}, "words as a shell reads them"),
        ({"HEADRACE_WORKERS": "each"}, "it may hold one or two"),
    ],
)
def test_bad_values_are_refused_by_name(said: dict[str, str], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        Settings.load({**ASKED, **said})


def test_the_gpu_is_split_and_nobody_gets_more_than_all_of_it() -> None:
    for percent in (5, 45, 90):
        vllm = Settings.load({**ASKED, "HEADRACE_VLLM_GPU_PERCENT": str(percent)}).vllm
        assert vllm is not None
        assert vllm.server is not None
        for num in (1, 2):
            ours = num * vllm.server.learner_share(num)
            assert ours > 0
            assert ours + percent / 100 == pytest.approx(1 - RESERVE)


def test_a_device_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from trainer.device_thread import Device

    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    Device(threads=1, gpu_share=0.5).close()
    assert shares == [], "a CPU is not split"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    Device(threads=1, gpu_share=0.5).close()
    assert shares == [0.5]


def test_it_starts_after_the_server_and_before_those_who_ask_it() -> None:
    said = {**ASKED, "HEADRACE_WORKERS": "two", "HEADRACE_VLLM_API_KEY": "secret"}
    settings = Settings.load({**said, "HEADRACE_VLLM_ARGUMENTS": "--dtype bfloat16"})
    children = child_specs(settings, said, database_url="postgresql://x")
    assert [child.name for child in children] == [
        "control",
        "vllm",
        "sampler",
        "learner",
        "serving",
    ]
    vllm = children[1]
    assert vllm.argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert " ".join(vllm.argv[3:]) == (
        "--model qwen3-tiny --host 127.0.0.1 --port 8421 --gpu-memory-utilization 0.45 --enable-lora "
        "--max-loras 6 --max-lora-rank 16 --logprobs-mode processed_logprobs --dtype bfloat16"
    )
    assert vllm.env_vars["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert "VLLM_SERVER_DEV_MODE" not in vllm.env_vars
    assert vllm.env_vars["VLLM_API_KEY"] == "secret"
    assert "secret" not in repr(settings)


def test_its_weights_can_be_replaced_if_it_may_sample_full_tuning() -> None:
    said = {**ASKED, "HEADRACE_VLLM_TUNING": "full"}
    vllm = Settings.load(said).vllm
    assert vllm is not None
    assert vllm.server is not None
    assert vllm.tuning == vllm.server.tuning == "full"
    assert vllm.server.env_vars({})["VLLM_SERVER_DEV_MODE"] == "1"


SUPERVISOR = """
import dataclasses, os, pathlib, sys
from infra.operations.local import home, supervisor
from infra.operations.local.child import Child
from infra.settings.settings import Settings
from tests.unit.infra.operations.local.test_supervisor import SERVER, WORKER

root = pathlib.Path(os.environ["HEADRACE_HOME"])
settings = Settings.load(os.environ)
home.prepare(root)

async def expire(url, worker): pass

supervisor._expire = expire
stand_ins = {
    "control": (sys.executable, "-c", SERVER, str(settings.port), str(root / "order")),
    "worker": (sys.executable, "-c", WORKER, str(root / "order")),
}
children = tuple(
    Child(dataclasses.replace(spec, argv=stand_ins.get(spec.name, spec.argv), forked=None),
          log=root / "logs" / (spec.name + ".log"))
    for spec in supervisor.child_specs(settings, os.environ, database_url="postgresql://x")
)
with home.own(root):
    supervisor.Supervisor(settings, children, url="").run(lambda: print("ready", flush=True))
"""


def child(root: Path) -> Any:
    state = json.loads((root / "supervisor.json").read_text())
    return next(c for c in state["children"] if c["name"] == "vllm")


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as reply:
            return bool(json.load(reply)["data"][0]["id"] == "base")
    except OSError:
        return False


@pytest.mark.processes
def test_it_is_started_restarted_and_stopped_in_order(tmp_path: Path) -> None:
    root, port = tmp_path / "home", free_port()
    notes = root / "notes"
    environ = {
        **os.environ,
        **ASKED,
        "HEADRACE_HOME": str(root),
        "HEADRACE_URL": f"http://127.0.0.1:{free_port()}",
        "HEADRACE_VLLM_COMMAND": f"{sys.executable} -P -m tests.kit.vllm_command --notes {notes}",
        "HEADRACE_VLLM_PORT": str(port),
        "HEADRACE_VLLM_GPU_PERCENT": "30",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR], env=environ, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        eventually(lambda: answers(port) or None, within_s=40, what="the server answers")
        told = json.loads(notes.read_text())
        assert told["gpu_memory_utilization"] == "0.3"
        assert told["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"

        first = child(root)
        os.kill(first["pid"], signal.SIGKILL)
        again = eventually(
            lambda: c if (c := child(root))["pid"] not in (None, first["pid"]) else None,
            within_s=40,
            what="the server is started again",
        )
        assert again["starts"] == 2
        eventually(lambda: answers(port) or None, within_s=40, what="the server answers")

        process.terminate()
        assert process.wait(120) == 0
        assert (root / "order").read_text().split() == ["worker", "vllm", "control"]
        assert not answers(port)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
