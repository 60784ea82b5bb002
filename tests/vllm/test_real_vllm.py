"""The vLLM sampler over real vLLM on the CPU. The fake server runs the same tests, so that its
behaviour is that of the real one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from schemas.events import StepSettled
from schemas.sampling import ModelRef
from tests.contracts.vllm_suite import VllmSuite, sampling_on
from tests.kit.real_vllm import RealVllm, real_vllm
from tests.kit.vllm import FakeVllm, fake_vllms, num_sampled
from tests.kit.vllm_run import SEED, check, train_run
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import build_base

SMALL = ModelRef(kind="scratch", name="qwen3-4m", seed=SEED)
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
            print(f"\n{len(distances)} tokens: mean {mean:.2e}, max {max(distances):.2e}")  # noqa: T201 - who runs this wants the figure
        assert mean <= 1e-6


def test_a_run_samples_on_real_vllm_and_is_rebuilt_from_its_log(
    server: RealVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asyncio.run(train_run(tmp_path, model=SMALL.name, vllm=(server.url,)))
    steps = [e for e in found.events if isinstance(e, StepSettled) and e.step]
    with capsys.disabled():
        for step in steps:
            print(f"\nstep {step.step}: mismatch {step.metrics['train/sampler_mismatch']:.2e}")  # noqa: T201 - who runs this wants the figure
    check(found, mismatch=1e-6)


async def test_a_real_server_that_dies_in_mid_generation_loses_nothing(
    server: RealVllm, tmp_path: Path
) -> None:
    """The last test of this module, because it kills the server. The requests that the server had
    begun move to another one, the fake, which starts only then. The first to end is the only short
    one: others are in progress."""
    fake = FakeVllm(Fallback(build_base(SMALL, {}, device=torch.device("cpu"))))
    async with (
        fake_vllms(fake) as other,
        sampling_on((server.url, *other), tmp_path, model=SMALL, patience_s=60) as world,
    ):
        await fake.die()
        policy = await world.policy(1)
        requests = [
            world.ask(sample=i, policy=policy, max_new_tokens=64 if i else 4) for i in range(8)
        ]
        tasks = [asyncio.create_task(world.sampler.sample(r)) for r in requests]
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        server.kill()
        assert tasks[0] in ended
        await fake.start()
        turns = await asyncio.gather(*tasks)
        assert world.sampler.fleet.replicas[0].away is not None
        assert num_sampled(fake) >= len(tasks) // 2
        for asked, turn in zip(requests, turns, strict=True):
            assert turn.logprobs == pytest.approx(await world.learner(asked, turn), abs=1e-5)
