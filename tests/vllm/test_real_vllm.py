"""The vLLM sampler over real vLLM on the CPU: what the fake is asked, so that the fake does not lie."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from schemas.sampling import ModelRef
from tests.contracts.vllm_suite import VllmSuite, sampling_on
from tests.kit.real_vllm import RealVllm, real_vllm
from trainer.base import build_base

SMALL = ModelRef(kind="scratch", name="qwen3-4m", seed=3)
"""The smallest shape whose heads vLLM's kernels for the CPU take."""

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVllm]:
    base = build_base(SMALL, {}, device=torch.device("cpu"))
    with real_vllm(base, tmp_path_factory.mktemp("vllm")) as server:
        yield server


class TestReal(VllmSuite):
    model = SMALL

    @pytest.fixture
    def urls(self, server: RealVllm) -> tuple[str, ...]:
        return (server.url,)

    async def test_logprobs_agree_to_1e_6(
        self, server: RealVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The mean over all tokens of a batch; the largest distance is printed."""
        async with sampling_on((server.url,), tmp_path, model=SMALL) as world:
            policy = await world.policy(7)
            requests = [
                world.ask(policy=policy, sample=i, temperature=0.8, max_new_tokens=64)
                for i in range(8)
            ]
            turns = await asyncio.gather(*(world.sampler.sample(r) for r in requests))
            distances = []
            for asked, turn in zip(requests, turns, strict=True):
                learner = await world.learner(asked, turn)
                distances += [abs(a - b) for a, b in zip(turn.logprobs, learner, strict=True)]
        mean = sum(distances) / len(distances)
        with capsys.disabled():
            print(f"\n{len(distances)} tokens: mean {mean:.2e}, max {max(distances):.2e}")  # noqa: T201
        assert mean <= 1e-6
