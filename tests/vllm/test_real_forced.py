"""Forced calls and formats over real vLLM on the CPU, and a run that trains on them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from schemas.events import StepSettled
from schemas.sampling import ModelRef
from tests.contracts.vllm_suite import ForcedSuite, World, sampling_on
from tests.kit.real_vllm import RealVllm, real_vllm
from tests.kit.tokenizers import readable_model
from tests.kit.vllm_run import SEED, check_forced, train_forced_run
from trainer.model.base import build_base

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RealVllm]:
    small = ModelRef(kind="scratch", name="qwen3-4m", seed=SEED)
    base = build_base(small, {}, device=torch.device("cpu"))
    readable_model(base, folder / "model")
    with real_vllm(base, folder, max_model_len=512) as server:
        yield server


class TestForced(ForcedSuite):
    @pytest.fixture
    async def world(self, server: RealVllm, folder: Path, tmp_path: Path) -> AsyncIterator[World]:
        model = ModelRef(kind="directory", name=str(folder / "model"))
        async with sampling_on((server.url,), tmp_path, model=model) as world:
            yield world


def test_a_run_trains_on_forced_answers_of_real_vllm(
    server: RealVllm, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asyncio.run(train_forced_run(tmp_path, model=folder / "model", vllm=(server.url,)))
    steps = [e for e in found.events if isinstance(e, StepSettled) and e.step]
    with capsys.disabled():
        for step in steps:
            print(f"\nstep {step.step}: mismatch {step.metrics['train/sampler_mismatch']:.2e}")  # noqa: T201 - who runs this wants the figure
    check_forced(found, mismatch=1e-6)
