"""bfloat16 weights under fp32 masters: which tensors are trained, rounded, or kept whole."""

import pytest
import torch

from schemas.learner import Conversation, LearnerJob, LearnerState, StepBatch, StepResult
from schemas.sampling import Sequence as Row
from schemas.sampling import Turn
from tests.unit.trainer.batches import CPU, MIXED, accumulate_grpo
from tests.unit.trainer.support import TINY, Shelf, job, loss_mask, request, weights_of
from trainer.engine import Engine
from trainer.forward.decoder import decoder_of
from trainer.forward.lm_head import logits_of
from trainer.forward.packing import Example, pack
from trainer.forward.rms_norm import rms_norm
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import build_base
from trainer.model.lora_names import Scaling
from trainer.objective.hyperparameters import Hyperparameters
from trainer.policy import LoadedModel, Policy, fresh_policy, parse

HALF = TINY.model_copy(update={"dtype": "bfloat16"})
TALK = tuple(Conversation(i, (("user", f"{i}?"), ("assistant", f"{i * 7 % 10}"))) for i in range(4))
ROUNDING = 2.0**-8


async def steps(
    engine: Engine, asked: LearnerJob, first: int, last: int
) -> list[tuple[StepResult, float]]:
    results = []
    for step in range(first, last + 1):
        batch = StepBatch(step, conversations=TALK)
        result = await engine.learner.step(asked, batch, export_state=True)
        results.append((result, result.metrics["train/loss"]))
    return results


def loaded(*, lean: bool = True) -> LoadedModel:
    base = build_base(HALF, {}, device=CPU)
    return LoadedModel(base, decoder_of(base) if lean else None, Fallback(base))


def test_weights_are_held_in_half_and_rotary_frequencies_are_not() -> None:
    base, whole = (build_base(ref, {}, device=CPU) for ref in (HALF, TINY))
    assert {p.dtype for p in base.model.parameters()} == {torch.bfloat16}
    assert base.num_bytes == whole.num_bytes / 2
    rotary = base.model.model.rotary_emb.inv_freq
    assert torch.equal(rotary, whole.model.model.rotary_emb.inv_freq)
    assert decoder_of(base) is not None


@pytest.mark.parametrize("tuning", ["lora", "full"])
async def test_training_learns_and_its_masters_stay_whole(engine: Engine, tuning: str) -> None:
    asked = job(HALF, algorithm="sft", tuning=tuning)
    first = await engine.learner.initialize(asked)
    taken = await steps(engine, asked, 1, 8)
    losses = [loss for _, loss in taken]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.2
    for data in (weights_of(first.state), weights_of(taken[-1][0].state)):
        assert {t.dtype for t in parse(data, device=CPU).values()} == {torch.float32}
    state = parse(taken[-1][0].state.state or b"", device=CPU)
    moments = {t.dtype for name, t in state.items() if name.startswith("exp_avg")}
    assert moments == {torch.float32}


async def test_a_step_too_small_for_half_is_not_lost(engine: Engine) -> None:
    """A change of 1e-6 to a weight of 1 is lost in bfloat16."""
    asked = job(HALF, algorithm="sft", tuning="full")
    training = asked.config.training.model_copy(update={"lr": 1e-6})
    config = asked.config.model_copy(update={"training": training})
    asked = LearnerJob(asked.run, config, asked.model, asked.total_steps)
    first = await engine.learner.initialize(asked)
    ((after, _),) = await steps(engine, asked, 1, 1)
    before, now = (parse(weights_of(r.state), device=CPU) for r in (first, after))
    norm = "model.norm.weight"
    assert not torch.equal(before[norm], now[norm])
    assert torch.equal(before[norm].bfloat16(), now[norm].bfloat16())


@pytest.mark.parametrize("tuning", ["lora", "full"])
async def test_resuming_is_never_having_stopped(engine: Engine, shelf: Shelf, tuning: str) -> None:
    asked = job(HALF, algorithm="sft", tuning=tuning)
    await engine.learner.initialize(asked)
    taken = await steps(engine, asked, 1, 4)
    other = Engine(fetch=shelf.fetch, threads=1)
    held: LearnerState = taken[1][0].state
    await other.learner.load(asked, held)
    again = await steps(other, asked, 3, 4)
    await other.aclose()
    assert [r.state for r, _ in again] == [r.state for r, _ in taken[2:]]


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    for tensor in policy.tensors.values():
        tensor.requires_grad_().grad = None
    accumulate_grpo(policy, MIXED, Hyperparameters())
    return {n: t.grad for n, t in policy.tensors.items() if t.grad is not None}


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "transformers"])
def test_gradients_are_those_of_whole_weights_but_for_rounding(lean: bool, variant: str) -> None:
    """The base is rounded in both, so only the arithmetic differs."""
    half = fresh_policy(loaded(lean=lean), job(HALF, lora_variant=variant))
    generator = torch.Generator().manual_seed(1)
    for tensor in half.tensors.values():
        tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    base = build_base(HALF, {}, device=CPU)
    base.model.float()
    whole_base = build_base(TINY, {}, device=CPU)
    for name, tensor in whole_base.tensors.items():
        tensor.copy_(base.tensors[name].float())
    decoder = decoder_of(whole_base)
    whole = Policy(
        LoadedModel(whole_base, decoder, Fallback(whole_base)),
        {n: t.clone() for n, t in half.tensors.items()},
        half.scaling,
    )
    expected, found = gradients(whole), gradients(half)
    assert {g.dtype for g in found.values()} == {torch.float32}
    assert found.keys() == expected.keys()
    joined = [torch.cat([part[name].flatten() for name in expected]) for part in (expected, found)]
    cosine = torch.nn.functional.cosine_similarity(joined[0], joined[1], dim=0)
    assert cosine > 0.999
    assert (joined[0] - joined[1]).norm() < 0.05 * joined[0].norm()


def test_the_head_rounds_no_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        (8 * torch.randn(shape, generator=generator)).bfloat16().requires_grad_()
        for shape in ((5, 32), (90, 32))
    )
    logits = logits_of(hidden, weight)
    exact = hidden.double() @ weight.double().t()
    assert logits.dtype == torch.float32
    assert (logits.double() - exact).abs().max() <= 1e-6 * exact.abs().max()
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    wanted = torch.autograd.grad((exact * weights).sum(), (hidden, weight), retain_graph=True)
    got = torch.autograd.grad((logits * weights).sum(), (hidden, weight))
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).abs().max() <= 2 * ROUNDING * other.abs().max()


def test_the_norm_sums_in_full() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 256, generator=generator).bfloat16().requires_grad_()
    weight = torch.rand(256, generator=generator).bfloat16()
    exact = rms_norm(x.detach().double().requires_grad_(), weight.double(), 1e-6)
    found = rms_norm(x, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    assert ((found - exact).abs() <= ROUNDING * exact.abs()).all()


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "transformers"])
async def test_the_sampler_serves_what_the_learner_trained(
    engine: Engine, shelf: Shelf, lean: bool, variant: str
) -> None:
    """Added to bfloat16 weights, a small adapter would be lost, so it is not added to them."""
    asked = job(HALF, algorithm="sft", lora_variant=variant)
    if not lean:
        engine.sampler._cache._loaded.put(HALF.model_dump_json(), loaded(lean=False))
    await engine.learner.initialize(asked)
    taken = await steps(engine, asked, 1, 24)
    policy = shelf.policy(taken[-1][0].state)
    turn = await engine.sampler.sample(request(model=HALF, policy=policy, max_new_tokens=20))
    held = await engine.sampler._cache.load_model(HALF)
    trained = Policy(held, await engine.sampler._cache.load_tensors(policy), Scaling(8.0))
    sampled = torch.tensor(turn.logprobs)
    assert (sampled - logprobs(trained, turn)).abs().max() < 0.05
    assert (sampled - logprobs(trained, turn, reference=True)).abs().max() > 0.2


@torch.no_grad()
def logprobs(policy: Policy, turn: Turn, *, reference: bool = False) -> torch.Tensor:
    prompt, answer = turn.prompt_ids, turn.completion_ids
    row = Row(
        tokens=prompt + answer,
        loss_mask=loss_mask(len(prompt), len(answer)),
        logprobs=(0.0,) * (len(prompt) + len(answer)),
    )
    (micro,) = pack(
        [Example(0, row)],
        micro_batch_tokens=4096,
        share=policy.shares_prompts,
        device=policy.loaded.base.model.device,
    )
    return policy.logprobs(micro, temperature=1.0, reference=reference)[0].cpu()
