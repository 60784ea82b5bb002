"""Real vLLM on the CPU as a teacher: it keeps the contract, and its logprobs are the learner's."""

from collections.abc import Iterator

import pytest
import torch

from infra.ports.teachers import Teachers
from schemas.sampling import ModelRef
from tests.contracts.teachers_suite import Served, TeachersSuite
from tests.kit.real_vllm import real_vllm
from tests.kit.teacher import row_of, texts_of
from trainer.forward.decoder import decoder_of
from trainer.forward.packing import Example, pack
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import Base, build_base
from trainer.model.lora_names import Scaling
from trainer.policy import LoadedModel, Policy

SHAPE = "qwen3-4m"
"""The smallest shape whose heads vLLM's kernels for the CPU take."""
CONTEXT = 128

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def base() -> Base:
    return build_base(ModelRef(kind="scratch", name=SHAPE, seed=3), {}, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def server(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("teacher")
    # With adapters vLLM 0.32 ends when it reads several prompts for their logprobs at once.
    with real_vllm(base, folder, max_model_len=CONTEXT, has_adapters=False) as server:
        yield Served(f"{server.url}/v1", str(folder / "model"), texts_of(SHAPE), CONTEXT)


class TestReal(TeachersSuite):
    @pytest.fixture
    def served(self, server: Served) -> Served:
        return server

    async def test_its_logprobs_are_those_of_the_learner(
        self, served: Served, teachers: Teachers, base: Base
    ) -> None:
        """The mean distance over all tokens of a row, in fp32."""
        tokens = tuple(9 + (7 * place) % 60 for place in range(100))
        row = row_of(tokens, prompt=10)
        found = await teachers.read(served.ref, row, key=None, what="a row")
        policy = Policy(LoadedModel(base, decoder_of(base), Fallback(base)), {}, Scaling(1.0))
        (micro,) = pack([Example(0, row)], micro_batch_tokens=512, share=False)
        with torch.no_grad():
            learner, _ = policy.logprobs(micro, temperature=1.0)
        gaps = [abs(a - float(b)) for a, b in zip(found.logprobs[10:], learner, strict=True)]
        assert sum(gaps) / len(gaps) <= 1e-6
