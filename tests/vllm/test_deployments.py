"""A checkpoint that real vLLM serves behind the OpenAI-compatible endpoint, for the openai package."""

from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from infra.operations.local.free_port import free_port
from schemas.sampling import ModelRef
from tests.e2e.test_deploy import client_of, deploy
from tests.kit.platform import eventually, make_workspace, platform, run_config
from tests.kit.real_vllm import UP_WITHIN_S, real_vllm
from tests.kit.vllm_run import SEED, TALK
from trainer.model.base import build_base

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.processes, pytest.mark.slow]

STEPS = 2
ASKED: Any = [{"role": "user", "content": "Say 3"}]


def test_a_deployment_answers_is_swapped_and_comes_back_with_vllm(tmp_path: Path) -> None:
    model = ModelRef(kind="scratch", name="qwen3-4m", seed=SEED)
    base = build_base(model, {}, device=torch.device("cpu"))
    port = free_port()
    workspace = make_workspace(tmp_path / "workspace", {"rollouts/say/main.py": TALK})
    config = run_config(
        experiment={"model_path": "scratch:qwen3-4m"},
        training={"max_response_length": 16, "max_answer_length": 8},
        advanced={"max_steps": STEPS, "seed": SEED, "deterministic": False},
        checkpoints={"checkpoint_save_freq": 1},
    )
    environment = {"HEADRACE_SAMPLER": f"vllm=http://127.0.0.1:{port}"}
    with platform(tmp_path / "home", environment=environment) as started:
        with real_vllm(base, tmp_path, port=port) as server, client_of(started) as client:
            started.post("/workspaces", {"url": str(workspace), "name": "w"})
            started.upload("numbers")
            run = started.submit(config, workspace="w", name="first")
            info = started.wait(run, within_s=UP_WITHIN_S)
            assert info["run"]["status"] == "finished", info["run"]
            made = deploy(started, f"first@{STEPS}", "sums")
            assert made["status"] == "active", made
            name = str(made["model"])
            answers = [_ask(client, name)]
            streamed = client.chat.completions.create(
                model=name, messages=ASKED, max_tokens=6, temperature=0, stream=True
            )
            parts = [one.choices[0].delta.content or "" for one in streamed if one.choices]
            assert "".join(parts) == answers[0]
            assert deploy(started, "first@1", "sums")["checkpoint"] == "first@1"
            assert deploy(started, f"first@{STEPS}", "sums")["status"] == "active"
            assert _ask(client, name) == answers[0], "the same version answers the same"
            server.kill()
            with (
                client_of(started, max_retries=0) as impatient,
                pytest.raises(openai.InternalServerError) as refused,
            ):
                _ask(impatient, name)
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"]
        with real_vllm(base, tmp_path, port=port), client_of(started, max_retries=0) as client:

            def answered() -> str | None:
                try:
                    return _ask(client, name)
                except openai.InternalServerError:
                    return None

            found = eventually(answered, within_s=120, what="the deployment answers again")
            assert found == answers[0]


def _ask(client: openai.OpenAI, model: str) -> str:
    answer = client.chat.completions.create(
        model=model, messages=ASKED, max_tokens=6, temperature=0
    )
    return answer.choices[0].message.content or ""
