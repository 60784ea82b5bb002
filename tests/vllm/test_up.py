"""A run through the vLLM server that `headrace up` started, as HEADRACE_SAMPLER=vllm gives it to a
user."""

import re
from pathlib import Path

import pytest
import torch

from infra.operations.local.free_port import free_port
from schemas.sampling import ModelRef
from tests.kit.platform import make_workspace, platform, run_config
from tests.kit.real_vllm import ENVIRONMENT, UP_WITHIN_S, python
from tests.kit.vllm_run import SEED, TALK
from trainer.model.base import build_base

STEPS = 2

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.processes, pytest.mark.slow]


def test_a_run_learns_through_the_vllm_that_up_has_started(tmp_path: Path) -> None:
    model = ModelRef(kind="scratch", name="qwen3-4m", seed=SEED)
    base = build_base(model, {}, device=torch.device("cpu"))
    base.model.save_pretrained(tmp_path / "model")
    base.tokenizer.save_pretrained(tmp_path / "model")
    workspace = make_workspace(tmp_path / "workspace", {"rollouts/say/main.py": TALK})
    config = run_config(
        experiment={"model_path": "scratch:qwen3-4m"},
        training={"max_response_length": 16, "max_answer_length": 8},
        advanced={"max_steps": STEPS, "seed": SEED, "deterministic": False},
    )
    environment = {
        **ENVIRONMENT,
        "HEADRACE_SAMPLER": "vllm",
        "HEADRACE_VLLM_MODEL": str(tmp_path / "model"),
        "HEADRACE_VLLM_COMMAND": f"env PYTHONPATH= {python()} -m vllm.entrypoints.openai.api_server",
        "HEADRACE_VLLM_PORT": str(free_port()),
        "HEADRACE_VLLM_ARGUMENTS": "--dtype float32 --enforce-eager --max-model-len 128",
    }
    with platform(tmp_path / "home", environment=environment) as started:
        started.post("/workspaces", {"url": str(workspace), "name": "w"})
        started.upload("numbers")
        run = started.submit(config, workspace="w")
        info = started.wait(run, within_s=UP_WITHIN_S)
        log = (tmp_path / "home" / "logs" / "vllm.log").read_text(errors="replace")
        assert info["run"]["status"] == "finished", f"{info['run'].get('error')}\n{log[-4000:]}"
        metrics = info["metrics"]
        assert len(metrics["rollout/raw_reward"]) == STEPS
        assert all(point["value"] <= 1e-6 for point in metrics["train/sampler_mismatch"]), metrics
        assert all(point["value"] > 0 for point in metrics["train/grad_norm"]), metrics
        loads = re.findall(r"POST /v1/load_lora_adapter HTTP/1\.1\" 200", log)
        assert len(loads) == STEPS, "each version that was sampled with was given to it once"
