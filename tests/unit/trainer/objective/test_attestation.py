"""Attestation over a real tiny model: a server that samples with other weights, another template or
another temperature is found, and an honest one is not."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from schemas.learner import GradedGroup, LearnerJob, SamplesRefuted, StepBatch
from schemas.models.sampling_server import SamplingServer
from schemas.sampling import PolicyRef, SampleRecord, Turn, sequences_of
from tests.unit.trainer.support import TINY, Shelf, job, request
from trainer.device_thread import Device
from trainer.engine import Engine
from trainer.forward.packing import Example, pack
from trainer.model.lora_names import Scaling, Tensors
from trainer.objective.attestation import (
    ALPHA,
    BFLOAT16_BOUND,
    EXACT_BOUND,
    SLACK,
    Witness,
    bounds_of,
    distance_terms,
    draw_terms,
    log_wealth,
)
from trainer.policy import LoadedModel, Policy, export, parse
from trainer.weight_cache import WeightCache

pytestmark = pytest.mark.torch

LIMIT = -math.log(ALPHA)
NUM_TOKENS = 64
CPU = torch.device("cpu")
SCALING = Scaling(32.0)


@dataclass(frozen=True)
class World:
    """A run after a few steps at the demo's learning rate: its versions, and turns that the newest one
    sampled. `rounded` is the same base in bfloat16, as a server has it."""

    loaded: LoadedModel
    rounded: LoadedModel
    versions: list[dict[str, torch.Tensor]]
    turns: list[Turn]

    @property
    def newest(self) -> dict[str, torch.Tensor]:
        return self.versions[-1]

    @property
    def recorded(self) -> torch.Tensor:
        return torch.tensor([x for turn in self.turns for x in turn.logprobs]).double()

    def learner(self, trained: Tensors, **given: float) -> torch.Tensor:
        return logprobs(self.loaded, trained, self.turns, **given)

    def server(self, trained: Tensors, **given: float) -> torch.Tensor:
        """What a server in bfloat16 reports for these tokens."""
        small = {name: tensor.bfloat16().float() for name, tensor in trained.items()}
        return logprobs(self.rounded, small, self.turns, **given)


def logprobs(
    loaded: LoadedModel, trained: Tensors, turns: list[Turn], *, temperature: float = 1.0
) -> torch.Tensor:
    """The logprobs of all tokens of these turns, one after the other."""
    policy = Policy(loaded, dict(trained), SCALING)
    rows = [Example(i, row) for i, turn in enumerate(turns) for row in sequences_of((turn,))]
    found = []
    with torch.no_grad():
        for row in rows:
            (micro,) = pack([row], micro_batch_tokens=1, share=False, device=CPU)
            found.append(policy.logprobs(micro, temperature=temperature)[0].double())
    return torch.cat(found)


async def build_world() -> World:
    shelf = Shelf()
    engine = Engine(fetch=shelf.fetch, threads=1)
    asked = job(lora_rank=16, lora_alpha=32.0, grad_clip=0.3, adam_beta2=0.95)
    training = asked.config.training.model_copy(update={"lr": 1e-3})
    asked = replace(asked, config=asked.config.model_copy(update={"training": training}))
    results = [await engine.learner.initialize(asked)]
    for step in (1, 2, 3):
        policy = shelf.policy(results[-1].state)
        turns = [await turn_of(engine, policy, slot=step, sample=i) for i in range(4)]
        rewards = tuple(sum(c in "aeiou" for c in t.text) / len(t.text or "x") for t in turns)
        batch = StepBatch(step, groups=(graded(turns, rewards),))
        results.append(await engine.learner.step(asked, batch, export_state=True))
    newest = shelf.policy(results[-1].state)
    turns = [await turn_of(engine, newest, slot=9, sample=i) for i in range(16)]
    await engine.aclose()
    device = Device(threads=1)
    cache = WeightCache(device, shelf.fetch)
    single = await cache.load_model(TINY)
    half = await cache.load_model(TINY.model_copy(update={"dtype": "bfloat16"}))
    device.close()
    versions = [parse(result.state.weights or b"", device=CPU) for result in results]
    return World(single, half, versions, turns)


async def turn_of(engine: Engine, policy: PolicyRef, *, slot: int, sample: int) -> Turn:
    asked = request(f"q{slot}", sample=sample, slot=slot, policy=policy, max_new_tokens=NUM_TOKENS)
    return await engine.sampler.sample(asked.model_copy(update={"lora_alpha": 32.0}))


def graded(
    turns: list[Turn], rewards: tuple[float, ...] = (), *, noise: float | None = None
) -> GradedGroup:
    servers = () if noise is None else (SamplingServer(url="http://s", noise=noise),)
    samples = tuple(
        SampleRecord(index=i, sequences=sequences_of((turn,)), servers=servers)
        for i, turn in enumerate(turns)
    )
    return GradedGroup(0, samples, rewards or (0.0,) * len(turns))


@pytest.fixture(scope="module")
def world() -> World:
    return asyncio.run(build_world())


def tokens_until_refuted(distance_E: torch.Tensor, bound: float) -> float:
    """After how many tokens these distances fail the test; infinity if they never do."""
    wealth_E = log_wealth(distance_terms(distance_E.abs() / bound), [0])
    crossed = (wealth_E >= LIMIT).nonzero()
    return int(crossed[0]) + 1 if len(crossed) else math.inf


def without_last_layer(trained: Tensors) -> Tensors:
    """An adapter without the layer that is nearest to the head."""
    return {name: tensor for name, tensor in trained.items() if ".layers.1." not in name}


def of_another_run(trained: Tensors) -> Tensors:
    return {n: -t if "lora_B" in n else t for n, t in trained.items()}


Mistake = Callable[[World, Callable[..., torch.Tensor]], torch.Tensor]
MISTAKES: dict[str, Mistake] = {
    "the base model": lambda w, says: says({}),
    "an adapter of another run": lambda w, says: says(of_another_run(w.newest)),
    "an adapter that is one step old": lambda w, says: says(w.versions[-2]),
    "an adapter without the layer at the head": lambda w, says: says(without_last_layer(w.newest)),
    "another temperature": lambda w, says: says(w.newest, temperature=0.8),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_within_64_tokens_in_float32(world: World, mistake: str) -> None:
    """The log names the newest version, and the server answers with something else."""
    reported = MISTAKES[mistake](world, world.learner)
    distance = reported - world.learner(world.newest)
    assert tokens_until_refuted(distance, EXACT_BOUND) <= 64


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_within_512_tokens_in_bfloat16(world: World, mistake: str) -> None:
    """The server computes in bfloat16, and its noise was measured with its base model at load."""
    noise = float((world.server({}) - world.learner({}))[:32].abs().mean())
    assert noise > EXACT_BOUND / SLACK, "the noise decides the bound"
    bound = SLACK * noise
    honest = world.server(world.newest) - world.learner(world.newest)
    assert tokens_until_refuted(honest, bound) == math.inf
    reported = MISTAKES[mistake](world, world.server)
    distance = reported - world.learner(world.newest)
    assert tokens_until_refuted(distance, bound) <= 512


def test_each_wrong_sample_of_a_hundred_is_found_and_no_other(world: World) -> None:
    """1 % of the requests get another run's adapter, and the server's other samples are right."""
    turns = world.turns * 13
    of_turn = [len(turn.completion_ids) for turn in world.turns]
    right = world.learner(world.newest).float().split(of_turn) * 13
    wrong = world.learner(of_another_run(world.newest)).split(of_turn) * 13
    lies = {57, 130}
    told = [
        turn.model_copy(update={"logprobs": tuple(wrong[n].tolist())}) if n in lies else turn
        for n, turn in enumerate(turns)
    ]
    witness = Witness([graded(told, noise=1e-7)], EXACT_BOUND, 103)
    for n, turn in enumerate(told):
        rows = [Example(n, row) for row in sequences_of((turn,))]
        (micro,) = pack(rows, micro_batch_tokens=1, share=False, device=CPU)
        witness.see(micro, right[n], -right[n])  # an entropy that makes the test of draws neutral
    with pytest.raises(SamplesRefuted) as refused:
        witness.judge()
    assert {one.index for one in refused.value.refutations} == lies
    assert {one.test for one in refused.value.refutations} == {"distance"}
    assert max(one.tokens for one in refused.value.refutations) <= 64


def test_a_wrong_template_is_found_within_64_tokens(world: World) -> None:
    """The server answered another prompt than the log has: the last tokens of the template are gone."""
    prompted = [
        turn.model_copy(update={"prompt_ids": turn.prompt_ids[:-2]}) for turn in world.turns
    ]
    reported = logprobs(world.loaded, world.newest, prompted)
    distance = reported - world.learner(world.newest)
    assert tokens_until_refuted(distance, EXACT_BOUND) <= 64


def test_an_honest_sampler_is_far_below_its_bound(world: World) -> None:
    distance = world.recorded - world.learner(world.newest)
    assert float(distance.abs().mean()) < EXACT_BOUND / 50
    assert tokens_until_refuted(distance, EXACT_BOUND) == math.inf


@pytest.mark.parametrize("tail", ["student with 2 degrees of freedom", "lognormal", "normal"])
def test_heavy_tailed_noise_raises_no_false_alarm(tail: str) -> None:
    """3 million tokens of noise whose mean is as large as the bound admits, in samples of 64."""
    draws = np.random.default_rng(5)
    size = (3_000_000 // 64, 64)
    noise = {
        "student with 2 degrees of freedom": lambda: np.abs(draws.standard_t(2, size)),
        "lognormal": lambda: draws.lognormal(0, 1.5, size),
        "normal": lambda: np.abs(draws.standard_normal(size)),
    }[tail]()
    ratio_E = torch.from_numpy(noise / noise.mean()).flatten()
    wealth_E = log_wealth(distance_terms(ratio_E), range(0, len(ratio_E), 64))
    assert float(wealth_E.max()) < LIMIT


def draws_of(temperature: float, *, number: int, scale: float = 3.0) -> torch.Tensor:
    """The log of the wealth after each of `number` tokens that were drawn at another temperature from
    a vocabulary of 500, while the logprobs that the server reports are right."""
    generator = torch.Generator().manual_seed(2)
    logits_E_V = torch.randn(number, 500, generator=generator).double() * scale
    logprobs_E_V = logits_E_V.log_softmax(-1)
    drawn_E = torch.multinomial((logits_E_V / temperature).softmax(-1), 1, generator=generator)
    loss_E = -logprobs_E_V.gather(1, drawn_E)[:, 0]
    entropy_E = -(logprobs_E_V.exp() * logprobs_E_V).sum(-1)
    return log_wealth(draw_terms(loss_E, entropy_E, 500), [0])


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.5])
def test_wrong_draws_with_right_logprobs_are_found(temperature: float) -> None:
    wealth_E = draws_of(temperature, number=1024)
    assert float(wealth_E.max()) >= LIMIT


def test_right_draws_are_not_refuted() -> None:
    assert float(draws_of(1.0, number=20_000).max()) < LIMIT / 2


@pytest.mark.parametrize("entropy", [0.0, 0.5, 3.0, 6.0])
def test_no_factor_of_the_draws_has_a_mean_above_one(entropy: float) -> None:
    """Checked exactly, over the vocabulary, for distributions from a single token to a uniform one."""
    vocabulary = 1000
    logits_V = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)).double()
    p_V = (logits_V * (8 - entropy)).softmax(-1)
    loss_V = -p_V.clamp(min=1e-300).log()
    entropy_V = (p_V * loss_V).sum().expand(vocabulary)
    factors_V_K = draw_terms(loss_V, entropy_V, vocabulary).exp()
    assert bool((factors_V_K > 0).all())
    assert float((p_V[:, None] * factors_V_K).sum(0).max()) <= 1 + 1e-9


async def play(
    engine: Engine, *, changed: int | None = None, shift: float = 0.0, attests: bool = True
) -> tuple[LearnerJob, StepBatch]:
    """A batch of eight samples of version 0, one of which reports other logprobs than it drew with."""
    asked = job()
    await engine.learner.initialize(asked)
    turns = [
        await engine.sampler.sample(request(f"q{i // 4}", sample=i, max_new_tokens=16))
        for i in range(8)
    ]
    if changed is not None:
        told = tuple(one - shift for one in turns[changed].logprobs)
        turns[changed] = turns[changed].model_copy(update={"logprobs": told})
    rewards = tuple(float(i % 3) for i in range(8))
    return asked, StepBatch(1, groups=(graded(turns, rewards),), attests=attests)


async def test_a_step_names_the_sample_that_is_wrong_and_changes_nothing(engine: Engine) -> None:
    asked, honest = await play(engine)
    expected = (await engine.learner.step(asked, honest, export_state=True)).state
    _, batch = await play(engine, changed=5, shift=0.05)
    with pytest.raises(SamplesRefuted) as refused:
        await engine.learner.step(asked, batch, export_state=True)
    (one,) = refused.value.refutations
    assert (one.index, one.test, one.server) == (5, "distance", "built-in")
    assert one.tokens <= 16
    assert one.distance == pytest.approx(0.05, rel=0.01)
    again = (await engine.learner.step(asked, honest, export_state=True)).state
    assert (again.weights_sha256, again.state_sha256) == (
        expected.weights_sha256,
        expected.state_sha256,
    )


async def test_twin_a_step_that_does_not_attest_trains_on_anything(engine: Engine) -> None:
    asked, honest = await play(engine)
    expected = (await engine.learner.step(asked, honest, export_state=True)).state
    _, batch = await play(engine, changed=5, shift=0.05, attests=False)
    trained = (await engine.learner.step(asked, batch, export_state=True)).state
    assert trained.weights_sha256 != expected.weights_sha256


async def test_attesting_changes_no_bit(engine: Engine) -> None:
    asked, batch = await play(engine)
    with_test = await engine.learner.step(asked, batch, export_state=True)
    _, batch = await play(engine, attests=False)
    without = await engine.learner.step(asked, batch, export_state=True)
    assert with_test.state.weights_sha256 == without.state.weights_sha256
    assert with_test.state.state_sha256 == without.state.state_sha256
    assert with_test.metrics["attest/share"] == 1.0
    assert with_test.metrics["attest/tokens"] == sum(
        sum(row.loss_mask) for sample in batch.groups[0].samples for row in sample.sequences
    )
    assert "attest/share" not in without.metrics


async def test_a_small_mistake_of_a_server_is_found_over_its_samples(engine: Engine) -> None:
    """Each sample by itself is too short: the distance is twice the bound of this server."""
    asked, batch = await play(engine)
    noise = EXACT_BOUND / SLACK
    rows = [
        row.model_copy(update={"logprobs": tuple(x - 2 * EXACT_BOUND for x in row.logprobs)})
        for sample in batch.groups[0].samples
        for row in sample.sequences
    ]
    server = SamplingServer(url="http://s", noise=noise)
    samples = tuple(
        SampleRecord(index=i, sequences=(rows[i % 8],), servers=(server,)) for i in range(64)
    )
    group = GradedGroup(0, samples, tuple(float(i % 3) for i in range(64)))
    with pytest.raises(SamplesRefuted) as refused:
        await engine.learner.step(
            asked, StepBatch(1, groups=(group,), attests=True), export_state=True
        )
    assert {one.test for one in refused.value.refutations} == {"server"}
    assert len(refused.value.refutations) == 64


def test_a_server_is_no_liar_because_its_tokens_are_harder_than_the_canary_s() -> None:
    """In bfloat16 the distance of honest tokens may be ten times what the canary measured."""
    server = SamplingServer(url="http://s", noise=0.002)
    records = [SampleRecord(index=n, servers=(server,)) for n in range(5)]
    honest: list[float | None] = [0.018, 0.02, 0.022, 0.4, None]
    assert bounds_of(records, honest, EXACT_BOUND) == [SLACK * 0.02] * 5
    assert bounds_of(records, [0.3] * 5, EXACT_BOUND) == [BFLOAT16_BOUND] * 5
    assert bounds_of(records, [0.0] * 5, EXACT_BOUND) == [SLACK * 0.002] * 5
    exact = [
        SampleRecord(index=n, servers=(SamplingServer(url="http://e", noise=1e-7),))
        for n in range(5)
    ]
    assert bounds_of(exact, honest, EXACT_BOUND) == [EXACT_BOUND] * 5, "float32 has no such excuse"


def test_a_logprob_that_is_not_a_number_is_refuted_and_the_learner_s_own_is_not_counted() -> None:
    ids = (1, 2, 3)
    turn = Turn(
        prompt_ids=(5,),
        completion_ids=ids,
        logprobs=(-1.0, math.nan, -1.0),
        text="",
        finish_reason="stop",
    )
    rows = [Example(0, row) for row in sequences_of((turn,))]
    (micro,) = pack(rows, micro_batch_tokens=9, share=False, device=CPU)
    witness = Witness([graded([turn])], EXACT_BOUND, 100)
    witness.see(micro, torch.full((3,), -1.0), torch.ones(3))
    with pytest.raises(SamplesRefuted):
        witness.judge()
    broken = Witness([graded([turn])], EXACT_BOUND, 100)
    broken.see(micro, torch.full((3,), math.nan), torch.ones(3))
    assert broken.judge() == {"attest/tokens": 0.0, "attest/share": 0.0}


async def lagged(engine: Engine, shelf: Shelf, *, wrong: int | None, step: int = 3) -> StepBatch:
    """A step whose samples were made by version 1, except for one of another run's adapter."""
    asked = job()
    results = [await engine.learner.initialize(asked)]
    for number in (1, 2):
        _, batch = await played(engine, shelf.policy(results[-1].state))
        results.append(
            await engine.learner.step(asked, replace(batch, step=number), export_state=True)
        )
    old = shelf.policy(results[1].state)
    other = {
        name: -8 * tensor if "lora_B" in name else tensor
        for name, tensor in parse(results[1].state.weights or b"", device=CPU).items()
    }
    another = PolicyRef(version=1, weights=shelf.put(export(other)))
    _, batch = await played(engine, old, wrong=wrong, other=another)
    return replace(batch, step=step, attests=True, sampled=old)


async def played(
    engine: Engine,
    policy: PolicyRef,
    *,
    wrong: int | None = None,
    other: PolicyRef | None = None,
) -> tuple[list[Turn], StepBatch]:
    turns = []
    for i in range(16):
        version = other if i == wrong and other else policy
        ask = request(f"q{i // 4}", sample=i, policy=version, max_new_tokens=16)
        turns.append(await engine.sampler.sample(ask))
    return turns, StepBatch(1, groups=(graded(turns, tuple(float(i % 3) for i in range(16))),))


async def test_in_asynchronous_modes_a_suspicious_sample_is_computed_again(
    engine: Engine, shelf: Shelf
) -> None:
    """With the version that the log names, and not with the one that is trained."""
    batch = await lagged(engine, shelf, wrong=6)
    with pytest.raises(SamplesRefuted) as refused:
        await engine.learner.step(job(), batch, export_state=True)
    assert [one.index for one in refused.value.refutations] == [6]


async def test_in_asynchronous_modes_right_samples_are_trained(
    engine: Engine, shelf: Shelf
) -> None:
    batch = await lagged(engine, shelf, wrong=None)
    metrics = (await engine.learner.step(job(), batch, export_state=True)).metrics
    assert metrics["train/sampler_mismatch"] > EXACT_BOUND, "the policy has changed since"
    assert metrics["attest/share"] < 0.2


async def test_in_asynchronous_modes_a_batch_without_tokens_is_trained(
    engine: Engine, shelf: Shelf
) -> None:
    version = shelf.policy((await engine.learner.initialize(job())).state)
    empty = tuple(SampleRecord(index=i, sequences=()) for i in range(2))
    batch = StepBatch(1, (GradedGroup(0, empty, (0.0, 1.0)),), attests=True, sampled=version)
    metrics = (await engine.learner.step(job(), batch, export_state=False)).metrics
    assert (metrics["attest/tokens"], metrics["attest/share"]) == (0.0, 0.0)
