"""Known traps of RL training that no other test here covers.

`docs/algorithms.md` lists them all with their tests.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from schemas.config import KlEstimator
from schemas.learner import GradedGroup, StepBatch
from schemas.sampling import ModelRef, SampleRecord, Turn, sequences_of
from schemas.sampling import Sequence as Row
from tests.unit.trainer.algorithms.test_registry import chosen, gradients, prepare
from tests.unit.trainer.batches import CPU, GROUPS, policy64
from tests.unit.trainer.support import TINY, job, request
from tests.unit.trainer.test_learner import play
from trainer import grpo
from trainer.engine import Engine
from trainer.forward.decoder import decoder_of
from trainer.forward.packing import Example, pack
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import build_base
from trainer.objective.correction import importance_weights
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import divergence
from trainer.objective.sequences import Rows
from trainer.policy import LoadedModel, fresh_policy


def graded(
    turns: list[Turn], rewards: tuple[float, ...], *, truncated: bool = False
) -> GradedGroup:
    samples = tuple(
        SampleRecord(index=i, sequences=sequences_of((turn,)), truncated=truncated)
        for i, turn in enumerate(turns)
    )
    return GradedGroup(0, samples, rewards)


async def sampled(engine: Engine, *, temperature: float) -> list[Turn]:
    return [
        await engine.sampler.sample(request(sample=i, temperature=temperature)) for i in range(3)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_trainer_and_sampler_agree_at_the_run_s_temperature(
    engine: Engine, temperature: float
) -> None:
    """Trap 5. The learner's logprobs equal those that were sampled from, to 1e-6."""
    turns = await sampled(engine, temperature=temperature)
    batch = StepBatch(1, groups=(graded(turns, (0.0, 1.0, 0.5)),))
    asked = job()
    warm = replace(
        asked,
        config=asked.config.model_copy(
            update={
                "sampling": asked.config.sampling.model_copy(
                    update={"rollout_temperature": temperature}
                )
            }
        ),
    )
    await engine.learner.initialize(warm)
    metrics = (await engine.learner.step(warm, batch, export_state=False)).metrics
    assert metrics["train/sampler_mismatch"] <= 1e-6
    if temperature != 1.0:
        await engine.learner.initialize(asked)
        metrics = (await engine.learner.step(asked, batch, export_state=False)).metrics
        assert metrics["train/sampler_mismatch"] > 1e-3, "twin: the temperature is left out"


def test_the_ratio_is_taken_against_one_of_three_policies_and_says_which() -> None:
    """Trap 4. mu sampled, pi_prox is the policy before the update, and pi_theta is trained."""
    drift = {}
    for correction in ("ratio", "decoupled"):
        policy = policy64()
        _, hyperparameters = chosen("grpo", kl_coef=0.0, correction=correction)
        seen: list[torch.Tensor] = []

        def spy(actions: Any, hyperparameters: Any, seen: list[torch.Tensor] = seen) -> Any:
            seen.append(actions.log_ratio_M.detach())
            return grpo.loss(actions, hyperparameters)

        batch = prepare(policy, GROUPS, replace(grpo.OBJECTIVE, loss=spy), hyperparameters)
        gradients(policy, batch)
        drift[correction] = torch.cat(seen).abs().max()
    assert float(drift["ratio"]) > 0.1, "mu is what the samples were recorded with"
    assert float(drift["decoupled"]) == 0.0, "pi_prox is pi_theta before the first update"


def test_an_answer_that_was_cut_trains_as_it_is() -> None:
    """Trap 7. The answer has no end token and none is added; its reward is treated like any
    other."""
    ended = Turn(
        prompt_ids=(5, 6),
        completion_ids=(20, 21, 2),
        logprobs=(-1, -1, -1),
        text="",
        finish_reason="stop",
    )
    cut = ended.model_copy(update={"completion_ids": (20, 21, 22), "finish_reason": "length"})
    group = graded([ended, cut], (1.0, 0.0))
    rows = [Example(i, s.sequences[0]) for i, s in enumerate(group.samples)]
    (micro,) = pack(rows, micro_batch_tokens=99, share=True)
    assert micro.target_M.tolist() == [20, 21, 2, 20, 21, 22]
    _, hyperparameters = chosen("grpo")
    both = [
        replace(group, samples=tuple(s.model_copy(update={"truncated": t}) for s in group.samples))
        for t in (False, True)
    ]
    found = [prepare(policy64(), (g,), grpo.OBJECTIVE, hyperparameters).values_E for g in both]
    assert torch.equal(found[0]["advantage"], found[1]["advantage"])
    assert torch.equal(found[0]["weight"], found[1]["weight"])


def divergences(estimator: KlEstimator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The expected gradient of an estimator in the loss, and the gradients of both divergences."""
    generator = torch.Generator().manual_seed(3)
    logits, reference = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    reference = reference.log_softmax(-1)

    def gradient(of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        of(leaf.log_softmax(-1)).backward()
        assert leaf.grad is not None
        return leaf.grad

    weights = logits.softmax(-1)
    expected = gradient(lambda now: (weights * divergence(estimator, reference - now)).sum())
    forward = gradient(lambda now: (now.exp() * (now - reference)).sum())
    backward = gradient(lambda now: (reference.exp() * (reference - now)).sum())
    return expected, forward, backward


def test_the_gradients_of_the_kl_estimators_are_three_different_things() -> None:
    """Trap 11."""
    noise, forward, backward = divergences("k1")
    torch.testing.assert_close(noise, torch.zeros_like(noise), atol=1e-12, rtol=0)
    torch.testing.assert_close(divergences("k2")[0], forward, atol=1e-12, rtol=0)
    torch.testing.assert_close(divergences("k3")[0], backward, atol=1e-12, rtol=0)
    assert (forward - backward).abs().max() > 1e-2


def test_a_window_on_sequences_empties_as_answers_grow_and_the_figure_shows_it() -> None:
    """Trap 12. The rounding is the same at each token; the share of actions that are masked is
    logged."""
    generator = torch.Generator().manual_seed(0)
    masked = {}
    for length in (8, 4096):
        noise = 0.05 * torch.randn(length * 32, generator=generator, dtype=torch.float64)
        rows = Rows(torch.arange(32).repeat_interleave(length), 32)
        for level in ("token", "sequence", "geometric"):
            hyperparameters = Hyperparameters(correction="masked", correction_level=level)
            masked[length, level] = float(
                importance_weights(noise, rows, hyperparameters)[1].double().mean()
            )
    assert masked[8, "token"] == masked[4096, "token"] == masked[4096, "geometric"] == 0.0
    assert masked[8, "sequence"] == 0.0
    assert masked[4096, "sequence"] > 0.5


async def test_the_masked_share_is_a_metric(engine: Engine) -> None:
    asked = job(correction="masked", correction_low=0.99, correction_high=1.0)
    await engine.learner.initialize(asked)
    metrics = (await engine.learner.step(asked, play(1), export_state=False)).metrics
    assert metrics["train/corrected_ratio"] > 0.5
    strict = job(off_policy_threshold=1e-6)
    await engine.learner.initialize(strict)
    metrics = (await engine.learner.step(strict, play(1), export_state=False)).metrics
    assert 0.0 < metrics["train/off_policy_ratio"] < 1.0


def test_a_tied_embedding_is_trained_from_both_its_ends() -> None:
    """Trap 15. Full tuning against the gradient of Transformers' own model, whose head and
    embedding are one tensor."""
    base = build_base(TINY, {}, device=CPU)
    loaded = LoadedModel(base, decoder_of(base), Fallback(base))
    policy = fresh_policy(loaded, job(tuning="full"))
    for tensor in policy.tensors.values():
        tensor.requires_grad_()
    tokens = (5, 9, 17, 30, 12)
    row = Row(tokens=tokens, loss_mask=(0, 0, 1, 1, 1), logprobs=(0.0,) * 5)
    (micro,) = pack([Example(0, row)], micro_batch_tokens=99, share=True)
    policy.logprobs(micro, temperature=1.0)[0].sum().backward()
    model: PreTrainedModel = build_base(TINY, {}, device=CPU).model
    model.requires_grad_(True)
    logprobs = model(torch.tensor([tokens])).logits[0, 1:-1].log_softmax(-1)
    logprobs.gather(-1, torch.tensor(tokens[2:])[:, None]).sum().backward()
    embedding = model.get_input_embeddings().weight
    assert embedding is model.get_output_embeddings().weight
    ours = policy.tensors["model.embed_tokens.weight"].grad
    torch.testing.assert_close(ours, embedding.grad, atol=1e-5, rtol=1e-4)


async def test_another_micro_batching_is_another_plan_and_other_bits(engine: Engine) -> None:
    """Trap 16. The plan is therefore a function of the rows and the config, and is part of the
    result."""
    results = []
    for run, tokens in (("a", 4096), ("b", 4096), ("c", 16)):
        asked = job(run=run, micro_batch_tokens=tokens)
        await engine.learner.initialize(asked)
        results.append(await engine.learner.step(asked, play(1), export_state=True))
    assert results[0].plan == results[1].plan != results[2].plan
    assert results[0].state.weights_sha256 == results[1].state.weights_sha256
    assert sum(results[0].plan) <= sum(results[2].plan)


@pytest.mark.parametrize("model", [TINY, ModelRef(kind="scratch", name="qwen3-tiny", seed=8)])
def test_a_value_is_read_from_the_state_that_predicts_the_action(model: ModelRef) -> None:
    """Trap 18, for the critic: on the lean path and through Transformers the head sees the same
    state, and no action's value depends on the action."""
    base = build_base(model, {}, device=CPU)
    policy = fresh_policy(LoadedModel(base, decoder_of(base), Fallback(base)), job(algorithm="ppo"))
    plain = replace(policy, loaded=replace(policy.loaded, decoder=None))
    rows = [
        Example(i, Row(tokens=(5, 9, 17, last), loss_mask=(0, 0, 1, 1), logprobs=(0.0,) * 4))
        for i, last in enumerate((30, 31))
    ]
    states = []
    for row in rows:
        (micro,) = pack([row], micro_batch_tokens=99, share=True)
        lean, through = policy.outputs(micro)[0], plain.outputs(micro)[0]
        torch.testing.assert_close(lean, through, atol=1e-4, rtol=1e-4)
        states.append(lean)
    assert torch.equal(states[0], states[1])
