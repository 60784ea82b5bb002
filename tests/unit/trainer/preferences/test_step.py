"""The step of preferences: packed equals unpacked, the loss is that of its parts, the reference is the
base, and a resumed step has the same bits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from schemas.config import Advanced
from schemas.errors import Refused
from schemas.learner import LearnerJob, Preference, StepBatch
from tests.unit.trainer.batches import policy64
from tests.unit.trainer.support import job
from trainer.engine import Engine
from trainer.forward.packing import Example, pack
from trainer.forward.transformers_pass import Fallback
from trainer.model.chat_template import Chat
from trainer.model.scalar_heads import SCORE_NAME
from trainer.objective.metrics import Means
from trainer.policy import LoadedModel, Policy
from trainer.preferences.batch import PreferenceBatch, encode, micro_batches
from trainer.preferences.registry import PREFERENCE_OBJECTIVES, settings_of
from trainer.preferences.step import PreferenceRun, evaluate, measure_baseline, micro_batch_loss

PAIRS = (
    Preference(0, (("user", "1?"),), "one", "I do not know"),
    Preference(1, (("system", "be brief"), ("user", "2?")), "two", "well, two"),
    Preference(2, (("user", "what is 3+4?"),), "7", "seven", margin=0.5),
)
SINGLE = (
    Preference(0, (("user", "1?"),), chosen="one"),
    Preference(1, (("user", "2?"),), rejected="three"),
    Preference(2, (("user", "what is 3+4?"),), chosen="7"),
    Preference(3, (("user", "what is 3+4?"),), rejected="eleven"),
)
VARIANTS: dict[str, dict[str, Any]] = {
    "dpo": {"algorithm": "dpo"},
    "dpo, sigmoid_norm": {"algorithm": "dpo", "preference_loss": "sigmoid_norm", "beta": 2.0},
    "dpo, ipo": {"algorithm": "dpo", "preference_loss": "ipo"},
    "dpo, hinge": {"algorithm": "dpo", "preference_loss": "hinge"},
    "dpo, smoothed": {"algorithm": "dpo", "label_smoothing": 0.1},
    "kto": {"algorithm": "kto", "desirable_weight": 1.5},
    "orpo": {"algorithm": "orpo"},
    "simpo": {"algorithm": "simpo"},
    "reward_model": {"algorithm": "reward_model"},
    "reward_model, centred": {"algorithm": "reward_model", "center_rewards_coefficient": 0.1},
}


def run_of(policy: Policy, tokens: int = 4096, **advanced: Any) -> PreferenceRun:
    chosen, base = Advanced(**advanced), policy.loaded.base
    return PreferenceRun(
        objective=PREFERENCE_OBJECTIVES[chosen.algorithm],
        settings=settings_of(chosen),
        chat=Chat(base.tokenizer, base.stop_ids),
        max_tokens=chosen.max_sequence_length,
        micro_batch_tokens=tokens,
    )


def batch_of(run: PreferenceRun, rows: tuple[Preference, ...] = PAIRS) -> PreferenceBatch:
    return encode(rows, run.objective, chat=run.chat, max_tokens=run.max_tokens)


def taken(
    policy: Policy, run: PreferenceRun, rows: tuple[Preference, ...] = PAIRS
) -> tuple[dict[str, float], dict[str, torch.Tensor], list[int]]:
    """Metrics, gradients and plan of one step's forward and backward."""
    for tensor in policy.tensors.values():
        tensor.grad = None
    batch, means, plan = batch_of(run, rows), Means(), []
    baseline = measure_baseline(policy, batch, run)
    for micro in micro_batches(policy, batch.units, micro_batch_tokens=run.micro_batch_tokens):
        micro_batch_loss(policy, micro, batch, run, baseline=baseline, means=means).backward()
        plan.append(micro.packed.num_tokens)
    gradients = {n: t.grad.clone() for n, t in policy.tensors.items() if t.grad is not None}
    return means.values(), gradients, plan


def policy_of(variant: str) -> Policy:
    """The tiny model in float64, with a head if the variant trains a reward model."""
    return policy64(algorithm=VARIANTS[variant]["algorithm"])


def without_decoder(policy: Policy) -> Policy:
    """The same policy through Transformers' own forward pass, which packs no rows."""
    loaded = LoadedModel(policy.loaded.base, None, Fallback(policy.loaded.base))
    return replace(policy, loaded=loaded)


@pytest.mark.parametrize("rows", [PAIRS, SINGLE], ids=["pairs", "single"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packing_and_micro_batches_change_nothing(
    variant: str, rows: tuple[Preference, ...]
) -> None:
    if rows is SINGLE and variant != "kto":
        return
    policy = policy_of(variant)
    metrics, gradients, whole = taken(policy, run_of(policy, **VARIANTS[variant]), rows)
    split, others, plan = taken(policy, run_of(policy, tokens=1, **VARIANTS[variant]), rows)
    assert (len(whole), len(plan)) == (1, len(rows))
    assert split == pytest.approx(metrics, abs=1e-11)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-11, rtol=0)


@pytest.mark.parametrize("variant", ["dpo", "kto", "orpo", "reward_model"])
def test_transformers_computes_the_same(variant: str) -> None:
    """Its norms round to fp32 internally."""
    policy = policy_of(variant)
    metrics, gradients, _ = taken(policy, run_of(policy, **VARIANTS[variant]))
    plain, others, plan = taken(
        without_decoder(policy), run_of(policy, tokens=64, **VARIANTS[variant])
    )
    assert len(plan) > 1
    assert plain == pytest.approx(metrics, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-5, rtol=0)


def scored(
    policy: Policy, example: Example, *, reference: bool = False, temperature: float = 1.0
) -> tuple[float, int]:
    """The summed logprob of an answer's tokens in a pass of its own, and how many they are."""
    (micro,) = pack([example], micro_batch_tokens=4096, share=False)
    with torch.no_grad():
        logprob_M, _ = policy.logprobs(micro, temperature=temperature, reference=reference)
    return float(logprob_M.sum()), len(logprob_M)


def test_the_loss_of_dpo_is_that_of_four_single_passes() -> None:
    policy = policy64()
    run = run_of(policy, algorithm="dpo", beta=0.3)
    metrics, _, _ = taken(policy, run)
    losses, won = [], 0
    for unit in batch_of(run).units:
        chosen, rejected = unit.examples
        ratio = [
            scored(policy, e)[0] - scored(policy, e, reference=True)[0] for e in (chosen, rejected)
        ]
        losses.append(-F.logsigmoid(torch.tensor(0.3 * (ratio[0] - ratio[1])).double()))
        won += ratio[0] > ratio[1]
    assert metrics["train/loss"] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-6)
    assert metrics["rewards/accuracies"] == pytest.approx(won / 3)


def test_an_answer_is_learned_to_its_end_token_and_its_prompt_is_context() -> None:
    policy = policy64()
    run = run_of(policy, algorithm="dpo")
    chosen, rejected = batch_of(run).units[0].examples
    for example, text in ((chosen, "one"), (rejected, "I do not know")):
        learned = [
            token
            for token, is_learned in zip(
                example.sequence.tokens, example.sequence.loss_mask, strict=True
            )
            if is_learned
        ]
        assert learned == [*run.chat.encode(text), 6]
    (micro,) = micro_batches(policy, batch_of(run).units[:1], micro_batch_tokens=4096)
    apart = sum(len(example.sequence.tokens) for example in (chosen, rejected))
    assert micro.packed.num_tokens < apart, "the prompt is packed once"


def test_the_reference_is_the_base_and_has_no_gradient() -> None:
    """A policy that equals the base has a loss of log 2 and rewards of 0, whatever its answers."""
    policy = policy64()
    with torch.no_grad():
        for tensor in policy.tensors.values():
            tensor.zero_()
    metrics, _, _ = taken(policy, run_of(policy, algorithm="dpo"))
    assert metrics["train/loss"] == pytest.approx(float(torch.tensor(2.0).double().log()))
    assert metrics["rewards/chosen"] == metrics["rewards/rejected"] == 0.0
    assert metrics["rewards/accuracies"] == 0.0, "a tie does not count as a win"


def drifted(policy: Policy, run: PreferenceRun) -> Policy:
    """The policy after a step that makes the answers of the baseline likelier."""
    for micro in micro_batches(policy, batch_of(run, SINGLE).mismatched, micro_batch_tokens=4096):
        policy.logprobs(micro.packed, temperature=1.0)[0].sum().backward()
    moved = {
        name: (t + 0.05 * (t.grad if t.grad is not None else 0)).detach().requires_grad_()
        for name, t in policy.tensors.items()
    }
    return replace(policy, tensors=moved)


def test_the_baseline_of_kto_is_a_mean_over_answers_to_other_prompts() -> None:
    """In micro-batches of any size. It is a number, so no gradient flows through it."""
    near = policy64()
    policy = drifted(near, run_of(near, algorithm="kto"))
    texts = [one.chosen or one.rejected or "" for one in SINGLE]
    for tokens in (1, 4096):
        run = run_of(policy, tokens=tokens, algorithm="kto")
        batch, ratios = batch_of(run, SINGLE), []
        for unit, text in zip(batch.mismatched, [texts[-1], *texts[:-1]], strict=True):
            (example,) = unit.examples
            ends = [*run.chat.encode(text), 6]
            assert list(example.sequence.tokens[-len(ends) :]) == ends
            ratios.append(scored(policy, example)[0] - scored(policy, example, reference=True)[0])
        expected = sum(ratios) / len(ratios)
        assert expected > 0.1
        assert measure_baseline(policy, batch, run) == pytest.approx(expected, abs=1e-6)


def test_the_baseline_of_kto_is_never_negative_and_0_without_another_row() -> None:
    policy = policy64()
    run = run_of(policy, algorithm="kto")
    ratios = [
        scored(policy, e)[0] - scored(policy, e, reference=True)[0]
        for unit in batch_of(run, SINGLE).mismatched
        for e in unit.examples
    ]
    assert sum(ratios) < 0
    assert measure_baseline(policy, batch_of(run, SINGLE), run) == 0.0
    assert measure_baseline(policy, batch_of(run, SINGLE[:1]), run) == 0.0


def test_rows_that_are_cut_are_counted_and_those_without_a_difference_are_not_learned() -> None:
    policy = policy64()
    run = run_of(policy, algorithm="dpo", max_sequence_length=16)
    prompt = (("user", "1?"),)
    rows = (
        Preference(0, prompt, "one", "two"),
        Preference(1, prompt, "abcdefghijklm", "abcdefghijklmnop"),
        Preference(2, (("user", "a question of many words"),), "one", "two"),
    )
    batch = batch_of(run, rows)
    assert len(batch.units) == batch.num_losses == 1
    metrics = batch.metrics()
    assert metrics["train/truncated_ratio"] == pytest.approx(2 / 3)
    assert metrics["train/unlearned_ratio"] == pytest.approx(2 / 3)
    nothing, gradients, plan = taken(policy, run, rows[1:])
    assert (nothing, gradients, plan) == ({}, {}, [])
    assert evaluate(policy, rows[1:], run) == {}


@pytest.mark.parametrize(
    ("row", "algorithm", "missing"),
    [
        (SINGLE[0], "dpo", "no rejected answer"),
        (SINGLE[1], "orpo", "no chosen answer"),
        (Preference(4, (("user", "1?"),)), "kto", "no chosen answer"),
    ],
)
def test_a_row_without_an_answer_is_refused_by_name(
    row: Preference, algorithm: str, missing: str
) -> None:
    policy = policy64()
    with pytest.raises(Refused, match=f"row {row.row} has {missing}"):
        batch_of(run_of(policy, algorithm=algorithm), (row,))


def preferred(step: int, rows: tuple[Preference, ...] = PAIRS) -> StepBatch:
    return StepBatch(step, preferences=rows)


Ask = Callable[..., LearnerJob]


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("variant", VARIANTS)
async def test_the_loss_falls_and_a_resumed_step_has_the_same_bits(
    engine: Engine, variant: str, tuning: str
) -> None:
    if (variant.partition(",")[0], tuning) == ("reward_model", "full"):
        return
    asked = job(tuning=tuning, total_steps=4, micro_batch_tokens=64, **VARIANTS[variant])
    await engine.learner.initialize(asked)
    before = await engine.learner.evaluate(asked, 0, PAIRS)
    assert await engine.learner.evaluate(asked, 0, PAIRS) == before, "measuring changes nothing"
    found = []
    for step in (1, 2, 3):
        found.append(await engine.learner.step(asked, preferred(step), export_state=True))
    after = await engine.learner.evaluate(asked, 3, PAIRS)
    assert after["eval/validation/loss"] < before["eval/validation/loss"]
    assert after["eval/validation/margin"] > before["eval/validation/margin"]
    assert after["eval/validation/accuracy"] >= before["eval/validation/accuracy"]
    await engine.learner.load(asked, found[1].state)
    again = await engine.learner.step(asked, preferred(3), export_state=True)
    assert again.state.weights == found[2].state.weights
    assert again.state.state == found[2].state.state


async def test_kto_without_pairs_has_no_accuracy(engine: Engine) -> None:
    asked = job(algorithm="kto")
    await engine.learner.initialize(asked)
    found = await engine.learner.evaluate(asked, 0, SINGLE)
    assert set(found) == {"eval/validation/loss", "eval/validation/margin"}
    result = await engine.learner.step(asked, preferred(1, SINGLE), export_state=False)
    assert result.metrics["train/kl"] == 0.0
    assert "rewards/accuracies" not in result.metrics


def test_a_reward_is_the_heads_value_at_the_token_that_ends_the_turn() -> None:
    """In a pass of its own, without our packing, and with the rows of a pair in one pass."""
    policy = policy_of("reward_model")
    units = batch_of(run_of(policy, algorithm="reward_model")).units
    (micro,) = micro_batches(policy, units, micro_batch_tokens=4096)
    found = policy.scores(micro.packed).tolist()
    examples = [example for unit in units for example in unit.examples]
    assert len(found) == len(examples)
    for score, example in zip(found, examples, strict=True):
        assert example.sequence.tokens[-1] == 6
        (alone,) = pack([example], micro_batch_tokens=4096, share=False)
        last = torch.tensor([len(example.sequence.tokens) - 1])
        hidden_H = policy.outputs(replace(alone, predictor_M=last))[0][0]
        expected = (hidden_H @ policy.tensors[SCORE_NAME][0]).item()
        assert score == pytest.approx(expected, abs=1e-12)


def test_a_pair_that_is_cut_is_not_learned_by_a_reward_model() -> None:
    policy = policy_of("reward_model")
    prompt = (("user", "1?"),)
    rows = (
        Preference(0, prompt, "one", "two"),
        Preference(1, prompt, "one", "a long answer, which is cut"),
    )
    run = run_of(policy, algorithm="reward_model", max_sequence_length=16)
    batch = batch_of(run, rows)
    assert len(batch.units) == batch.num_losses == 1
    assert batch.metrics()["train/unlearned_ratio"] == 0.5
    dpo = batch_of(run_of(policy, algorithm="dpo", max_sequence_length=16), rows)
    assert len(dpo.units) == 2, "other algorithms learn what is left of it"


def test_a_reward_model_begins_with_a_head_from_its_seed() -> None:
    heads = [
        policy64(algorithm="reward_model", seed=seed).tensors[SCORE_NAME] for seed in (1, 1, 2)
    ]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert SCORE_NAME not in policy64(algorithm="dpo").tensors
