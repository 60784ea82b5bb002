"""A whole run that samples through vLLM's protocol; `tests/vllm` has the same over real vLLM."""

import asyncio
from pathlib import Path

import pytest
import torch

from schemas.events import RunWarned
from schemas.sampling import ModelRef
from tests.kit.vllm import FakeVllm, fake_vllms
from tests.kit.vllm_run import SEED, check, train_run
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import build_base

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch]


def test_a_run_samples_on_servers_and_is_rebuilt_from_its_log(tmp_path: Path) -> None:
    tiny = ModelRef(kind="scratch", name="qwen3-tiny", seed=SEED)
    fallback = Fallback(build_base(tiny, {}, device=torch.device("cpu")))

    async def run() -> None:
        fakes = (FakeVllm(fallback), FakeVllm(fallback))
        async with fake_vllms(*fakes) as urls:
            check(await train_run(tmp_path, model="qwen3-tiny", vllm=urls), mismatch=1e-6)
        assert all(len(fake.loads) == 3 for fake in fakes)

    asyncio.run(run())


def test_a_run_goes_on_without_a_fenced_server_and_warns(tmp_path: Path) -> None:
    """The first adapter is the base model; from the second on the deaf server is found out."""
    tiny = ModelRef(kind="scratch", name="qwen3-tiny", seed=SEED)
    fallback = Fallback(build_base(tiny, {}, device=torch.device("cpu")))

    async def run() -> None:
        deaf, good = FakeVllm(fallback, deaf=True), FakeVllm(fallback)
        async with fake_vllms(deaf, good) as urls:
            found = await train_run(tmp_path, model="qwen3-tiny", vllm=urls)
        check(found, mismatch=1e-6)
        (warning,) = [e for e in found.events if isinstance(e, RunWarned)]
        assert warning.about == "sampler"
        assert f"{deaf.url} is fenced" in warning.message

    asyncio.run(run())
