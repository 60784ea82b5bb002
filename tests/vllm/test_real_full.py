"""All weights of real vLLM on the CPU are replaced while it runs, and a run trains all weights with it.

The output head is apart from the embedding. vLLM's kernels for the CPU keep a copy of a tied head, which
`reload_weights` leaves as it was. The last test shows that such a server is found out.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from schemas.errors import CorruptData
from schemas.events import StepSettled
from schemas.sampling import ModelRef
from tests.contracts.vllm_suite import FullSuite, World, sampling_on
from tests.kit.real_vllm import RealVllm, real_vllm
from tests.kit.vllm_run import SEED, check, train_run
from trainer.model.base import Base, build_base

SMALL = ModelRef(kind="scratch", name="qwen3-4m", seed=SEED)

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.slow]


def untied() -> Base:
    """The small model with an output head of its own."""
    base = build_base(SMALL, {}, device=torch.device("cpu"))
    head = base.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    base.model.config.tie_word_embeddings = False
    return base


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RealVllm]:
    with real_vllm(untied(), folder, dev_mode=True) as server:
        yield server


class TestFull(FullSuite):
    @pytest.fixture
    async def world(self, server: RealVllm, folder: Path, tmp_path: Path) -> AsyncIterator[World]:
        model = ModelRef(kind="directory", name=str(folder / "model"))
        async with sampling_on((server.url,), tmp_path, model=model) as world:
            yield world


def test_a_run_trains_all_weights_with_real_vllm(
    server: RealVllm, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder / "model"
    found = asyncio.run(train_run(tmp_path, model=model, vllm=(server.url,), tuning="full"))
    steps = [e for e in found.events if isinstance(e, StepSettled) and e.step]
    with capsys.disabled():
        for step in steps:
            print(f"\nstep {step.step}: mismatch {step.metrics['train/sampler_mismatch']:.2e}")  # noqa: T201 - who runs this wants the figure
    check(found, mismatch=1e-6)


async def test_a_server_that_keeps_its_old_output_head_is_found_out(tmp_path: Path) -> None:
    """vLLM answers that it loaded the weights."""
    base = build_base(SMALL, {}, device=torch.device("cpu"))
    with real_vllm(base, tmp_path, dev_mode=True) as server:
        async with sampling_on((server.url,), tmp_path, model=SMALL) as world:
            asked = world.ask_full("hi", await world.full_policy(1), max_new_tokens=4)
            with pytest.raises(
                CorruptData, match=r"every sampler is fenced: .*differ from the lear"
            ):
                await world.sampler.sample(asked)
