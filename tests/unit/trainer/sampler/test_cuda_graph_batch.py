"""The decode batch of a GPU, run on a CPU. Buffers, padding, bursts and draws are the same; only
the replay of a recorded graph is replaced by a call."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from schemas.sampling import PolicyRef, SampleRequest, Turn
from tests.unit.trainer.support import TINY, Shelf, job, request
from trainer.engine import Engine
from trainer.sampler import memory_limits
from trainer.sampler.cuda_graph_batch import BURST, CudaGraphBatch, padded_rows
from trainer.sampler.decode_batch import DecodeBatch
from trainer.sampler.draw_token import draw_tokens
from trainer.sampler.draw_token_gpu import draw_on_gpu

HALF = TINY.model_copy(update={"dtype": "bfloat16"})


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run as on a GPU; gives the number of rows of each recorded step."""
    recorded: list[int] = []
    plain = CudaGraphBatch._record

    def seen(batch: CudaGraphBatch, num: int) -> Any:
        recorded.append(num)
        return plain(batch, num)

    monkeypatch.setattr(CudaGraphBatch, "_record", seen)
    gpu = replace(memory_limits.CPU, most_rows=16, uses_graphs=True)
    monkeypatch.setattr("trainer.sampler.batcher.memory_limits_of", lambda device: gpu)
    return recorded


async def together(engine: Engine, asked: list[SampleRequest]) -> list[Turn]:
    return list(await asyncio.gather(*(engine.sampler.sample(r) for r in asked)))


def many(**params: Any) -> list[SampleRequest]:
    """Prompts and answers of all lengths, some of which outgrow their batch on the way."""
    return [
        request("x" * (5 * i), sample=i, max_new_tokens=1 + 9 * i % 60, **params) for i in range(20)
    ]


async def same(engine: Engine, shelf: Shelf, asked: list[SampleRequest]) -> None:
    found = await together(engine, asked)
    plain = Engine(fetch=shelf.fetch, threads=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "trainer.sampler.batcher.memory_limits_of", lambda device: memory_limits.CPU
        )
        expected = await together(plain, asked)
    await plain.aclose()
    for one, other in zip(found, expected, strict=True):
        assert one.completion_ids == other.completion_ids
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


async def test_it_samples_what_the_plain_lane_samples(
    engine: Engine, shelf: Shelf, graphs: list[int]
) -> None:
    await same(engine, shelf, many(temperature=0.7))
    assert set(graphs) <= {1, 2, 4, 8, 16}
    assert len(graphs) > len(set(graphs)), "several batches, each with steps of its own"


async def test_greedy_rows_and_rows_with_top_p_share_lanes_with_others(
    engine: Engine, shelf: Shelf, graphs: list[int]
) -> None:
    asked = [request(sample=i, temperature=i % 2 * 0.9, max_new_tokens=20) for i in range(5)]
    cut = request(sample=7, top_p=0.5, max_new_tokens=10)
    cut = cut.model_copy(update={"key": cut.key.model_copy(update={"purpose": "evaluate"})})
    await same(engine, shelf, [*asked, cut])
    assert graphs


@pytest.mark.parametrize("variant", ["lora", "dora"])
async def test_versions_follow_one_another_in_the_same_buffers(
    engine: Engine, shelf: Shelf, graphs: list[int], variant: str
) -> None:
    """Recording a graph again for each version of a run would cost more than sampling."""
    first = await engine.learner.initialize(job(seed=1, lora_variant=variant))
    policies = [shelf.policy(first.state)]
    for seed in (2, 3):
        asked = job(seed=seed, run=f"r{seed}", lora_variant=variant)
        other = await engine.learner.initialize(asked)
        held = await engine.sampler._cache.load_tensors(shelf.policy(other.state))
        for name, tensor in held.items():
            if "lora_B" in name:
                generator = torch.Generator().manual_seed(seed)
                tensor += 0.3 * torch.randn(tensor.shape, generator=generator).to(tensor)
        policies.append(shelf.policy(other.state))
    said = []
    for policy in (*policies, policies[1]):
        turns = await together(engine, [request(sample=i, policy=policy) for i in range(3)])
        said.append([t.logprobs for t in turns])
    assert len(graphs) == 1
    assert said[1] == said[3]
    assert said[0] != said[1] != said[2]
    plain = await together(
        engine, [request(sample=i, policy=PolicyRef(version=0)) for i in range(3)]
    )
    assert [t.logprobs for t in plain] == [pytest.approx(s, abs=1e-5) for s in said[0]]


async def test_half_precision_samples_too(engine: Engine, shelf: Shelf, graphs: list[int]) -> None:
    turns = await together(engine, [request(sample=i, model=HALF) for i in range(3)])
    assert graphs
    assert all(len(turn.logprobs) == len(turn.completion_ids) for turn in turns)


async def test_a_burst_ends_with_the_cache_and_with_the_longest_answer(
    engine: Engine, graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bursts: list[int] = []
    plain = CudaGraphBatch._turns

    def seen(batch: CudaGraphBatch) -> int:
        bursts.append(plain(batch))
        return bursts[-1]

    monkeypatch.setattr(CudaGraphBatch, "_turns", seen)
    turn = await engine.sampler.sample(request("x" * 12, max_new_tokens=31, seed=5))
    drawn = len(turn.completion_ids)
    assert max(bursts) == BURST
    assert drawn - 1 <= sum(bursts) < drawn + BURST
    assert min(bursts) >= 1


def test_steps_are_recorded_for_powers_of_two() -> None:
    assert [padded_rows(n, 24) for n in (1, 2, 3, 5, 16, 17, 24)] == [1, 2, 4, 8, 16, 24, 24]


@pytest.mark.parametrize("vocabulary", [5, 512, 1300])
def test_draws_are_those_of_choose(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(400, vocabulary, generator=generator)
    temperatures = [0.0 if i % 9 == 0 else 0.5 + (i % 4) / 2 for i in range(400)]
    uniforms = torch.rand(400, generator=generator, dtype=torch.float64).tolist()
    tokens, logprobs = draw_tokens(
        logits, temperatures=temperatures, top_ps=[1.0] * 400, uniforms=uniforms
    )
    found, chosen = draw_on_gpu(logits, torch.tensor(temperatures), torch.tensor(uniforms).double())
    differ = sum(a != b for a, b in zip(found.tolist(), tokens, strict=True))
    assert differ <= 1, "only where a number falls within rounding of a boundary"
    alike = [i for i in range(400) if found[i] == tokens[i]]
    assert chosen[alike].tolist() == pytest.approx([logprobs[i] for i in alike], abs=1e-5)


def test_a_draw_never_leaves_the_mass() -> None:
    """Numbers next to 1 and masses that round to nothing: the token that is drawn always has a
    probability."""
    logits = torch.full((3, 700), -60.0)
    logits[0, 3] = 0.0
    logits[1, 699] = 0.0
    logits[2, :512] = torch.linspace(-90, 0, 512)
    for number in (0.0, 0.5, 1 - 2.0**-53):
        numbers = torch.full((3,), number, dtype=torch.float64)
        tokens, logprobs = draw_on_gpu(logits, torch.ones(3), numbers)
        assert torch.isfinite(logprobs).all()
        if number == 0.5:
            assert tokens[:2].tolist() == [3, 699]
        whole_blocks = torch.full((1, 1024), -200.0)
        whole_blocks[0, :9] = 0.0
        (token,), _ = draw_on_gpu(whole_blocks, torch.ones(1), numbers[:1])
        assert token < 9


def test_logits_that_are_not_finite_say_so() -> None:
    _, logprobs = draw_on_gpu(
        torch.full((1, 9), float("nan")), torch.ones(1), torch.zeros(1).double()
    )
    assert not torch.isfinite(logprobs).any()


def test_a_plain_lane_is_what_a_cpu_gets() -> None:
    assert not memory_limits.memory_limits_of(torch.device("cpu")).uses_graphs
    assert not issubclass(DecodeBatch, CudaGraphBatch)
