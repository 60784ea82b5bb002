"""kill -9 of workers and of the vLLM server while runs sample there: one with full tuning, whose
versions take turns on the server, and one with forced answers. The weights are those of undisturbed
runs."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from infra.operations.local.free_port import free_port
from infra.operations.local.home import read_state
from schemas.sampling import ModelRef
from tests.chaos.trials import verified
from tests.kit.forced_answers import FILES, forced_run
from tests.kit.kills import Points, Stage
from tests.kit.ledger import check
from tests.kit.platform import ROOT, Platform, eventually, final_adapter, run_config
from tests.kit.tokenizers import readable_model
from trainer.model.base import build_base

STEPS, SEED = 4, 7
POINTS: Points = {
    "rollout.perform.GenerateSample.claimed": 7,
    "rollout.perform.GenerateSample.effect_done": 5,
    "learn.perform.TrainStep.claimed": 2,
    "learn.perform.TrainStep.effect_done": 2,
}


def act_full(stage: Stage) -> str:
    """The hash of the last weights. One step ahead, so that requests for two versions come at once."""
    keys = {"tuning": "full", "execution_mode": "one_step_off_async", "state_interval": 2}
    config = run_config(
        training={"lr": 1e-3},
        advanced={**keys, "max_steps": STEPS, "seed": SEED, "deterministic": False},
    )
    with sampling_on_vllm(stage, "qwen3-tiny", HEADRACE_VLLM_TUNING="full") as running:
        run = running.submit(config, workspace="w")
        if stage.points:
            for step in (1, 3):
                kill_server(running, run, step)
        return ended(running, run)


def act_forced(stage: Stage) -> str:
    """The hash of the last adapter. Each sample has a forced format and a forced call."""
    tiny = ModelRef(kind="scratch", name="qwen3-tiny", seed=SEED)
    model = stage.root / "model"
    readable_model(build_base(tiny, {}, device=torch.device("cpu")), model)
    config = forced_run(max_steps=STEPS, state_interval=2, deterministic=False)
    config["experiment"]["model_path"] = str(model)
    with sampling_on_vllm(stage, str(model)) as running:
        run = running.submit(config, workspace="w")
        if stage.points:
            kill_server(running, run, 2)
        return ended(running, run)


@contextmanager
def sampling_on_vllm(stage: Stage, model: str, **settings: str) -> Iterator[Platform]:
    """A platform that has started a fake vLLM server of this model."""
    notes = stage.root / "vllm.json"
    command = f"{sys.executable} -P -m tests.kit.vllm_command --notes {notes} --seed {SEED}"
    environment = {
        "HEADRACE_SAMPLER": "vllm",
        "HEADRACE_VLLM_MODEL": model,
        "HEADRACE_VLLM_COMMAND": command,
        "HEADRACE_VLLM_PORT": str(free_port()),
        "PYTHONPATH": str(ROOT),
        **settings,
    }
    with stage.platform(
        environment, files=None if "HEADRACE_VLLM_TUNING" in settings else FILES
    ) as it:
        yield it


def kill_server(running: Platform, run: str, step: int) -> None:
    """`kill -9` of the vLLM server after this step of a run."""
    eventually(partial(_is_at, running, run, step), within_s=120, what=f"step {step}")
    os.kill(
        eventually(partial(_server, running.home), within_s=60, what="a server"), signal.SIGKILL
    )


def _is_at(running: Platform, run: str, step: int) -> bool | None:
    return (running.info(run)["run"]["current_step"] or 0) >= step or None


def _server(home: Path) -> int | None:
    state = read_state(home)
    found = [child.pid for child in state.children if child.name == "vllm"] if state else []
    return found[0] if found else None


def ended(running: Platform, run: str) -> str:
    """The hash of the weights of a run that ended, whose samples are from the versions in its log."""
    info = running.wait(run, "finished", within_s=300)
    check(running.events(run), steps=STEPS, groups=2, samples=4)
    mismatch = [point["value"] for point in info["metrics"]["train/sampler_mismatch"]]
    assert any(point["value"] > 0 for point in info["metrics"]["train/grad_norm"])
    assert min(mismatch) < 1e-5, mismatch
    verified(running, run)
    return final_adapter(info)
