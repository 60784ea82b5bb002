"""Figures computed by hand, for known bugs that no other test catches."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schemas.config import Advanced
from schemas.learner import Conversation
from schemas.sampling import PolicyRef
from tests.unit.trainer.algorithms.test_registry import chosen, gradients, prepare
from tests.unit.trainer.batches import GROUPS, group, policy64
from tests.unit.trainer.support import TINY, Shelf, job, request
from tests.unit.trainer.test_learner import play
from tests.unit.trainer.test_optimizer import leaves
from trainer import grpo
from trainer.algorithms import cispo, dppo, gdpo, gmpo, gpg, gspo, rloo, sapo, sft
from trainer.algorithms.ppo import gae
from trainer.engine import Engine
from trainer.forward.packing import Example, pack
from trainer.model.base import _stop_ids, build_base
from trainer.model.chat_template import Chat
from trainer.model.lora_names import Scaling
from trainer.objective.correction import importance_weights
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import Actions, BatchBeforeUpdate
from trainer.objective.returns import reward_at_last_action
from trainer.objective.sequences import Rows
from trainer.objective.value_loss import value_loss
from trainer.optimizer import Optimizer, lr_at


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_group_is_its_own_baseline() -> None:
    """Each sample's advantage is that of its own group, as it comes out of the formula."""
    groups = (group(0, (1.0, 0.0, 0.25)), group(1, (10.0, 12.0, 17.0)))
    batch = prepare(policy64(), groups, grpo.OBJECTIVE, Hyperparameters())
    expected = [
        advantage
        for each in groups
        for advantage, sample in zip(grpo.advantages(each.rewards), each.samples, strict=True)
        for _ in range(sum(sample.sequences[0].loss_mask))
    ]
    assert batch.values_E["advantage"].tolist() == expected


def test_the_baseline_of_rloo_is_the_others() -> None:
    assert rloo.advantages((1.0, 0.0, 5.0)) == pytest.approx([1 - 2.5, 0 - 3.0, 5 - 0.5])


def test_after_the_last_action_comes_nothing() -> None:
    """Two samples: the first one's last action does not see the value of the second's first."""
    rewards, values = floats(0, 1, 0, 2), floats(0.5, 0.25, 100, 50)
    advantage, target = gae(rewards, values, torch.tensor([0, 0, 1, 1]), gamma=1.0, gae_lambda=0.5)
    assert advantage[1] == 1 - 0.25
    assert advantage[0] == (0 + 0.25 - 0.5) + 0.5 * 0.75
    assert torch.equal(target, advantage + values)


def test_the_reward_is_paid_at_the_last_action() -> None:
    paid = reward_at_last_action([3.0, None, 5.0], torch.tensor([0, 0, 1, 2, 2]))
    assert paid.tolist() == [0, 3, 0, 0, 5]


def test_every_action_sees_the_reward_at_the_end() -> None:
    """Also those before a tool answered. Tokens in between are not steps of the policy."""
    advantage, _ = gae(
        floats(0, 0, 1), floats(0, 0, 0), torch.tensor([0, 0, 0]), gamma=0.5, gae_lambda=1.0
    )
    assert advantage.tolist() == [0.25, 0.5, 1.0]


def test_the_kl_is_that_of_the_policy_from_the_reference() -> None:
    policy = policy64()
    objective, hyperparameters = chosen("grpo")
    batch = prepare(policy, GROUPS[:1], objective, hyperparameters)
    _, metrics = gradients(policy, batch)
    kls = []
    for micro, _ in batch.micro_batches(policy):
        now = policy.logprobs(micro, temperature=1.0)[0].detach()
        reference = policy.logprobs(micro, temperature=1.0, reference=True)[0].detach()
        kls += ((reference - now).exp() - (reference - now) - 1).tolist()
    assert metrics["train/kl"] == pytest.approx(math.fsum(kls) / len(kls), rel=1e-9)


def test_a_window_has_two_sides() -> None:
    hyperparameters = Hyperparameters(correction="masked", correction_low=0.5, correction_high=2.0)
    weights, touched = importance_weights(
        floats(0.4, 0.6, 1.9, 2.1).log(), Rows(torch.arange(4), 4), hyperparameters
    )
    assert weights.tolist() == pytest.approx([0, 0.6, 1.9, 0])
    assert touched.tolist() == [True, False, False, True]


def actions(ratios: torch.Tensor, advantages: torch.Tensor, rows: Rows) -> Actions:
    """Actions that were sampled at log-probability -1 and are now `ratios` times as likely."""
    logprobs = (ratios.log() - 1).requires_grad_()
    return Actions(logprobs, logprobs + 1, advantages, rows)


def test_the_ratio_of_gspo_is_the_sequence_s() -> None:
    asked = actions(floats(2, 0.5, 1.5), floats(1, 1, 1), Rows(torch.tensor([0, 0, 1]), 2))
    loss, _ = gspo.loss(asked, Hyperparameters(clip_low=9.0, clip_high=9.0))
    assert loss.tolist() == pytest.approx([-1, -1, -1.5])


def test_cispo_bounds_the_weight_and_every_token_learns() -> None:
    asked = actions(floats(0.5, 2, 9), floats(1, -1, 1), Rows(torch.arange(3), 3))
    loss, clipped = cispo.loss(asked, Hyperparameters(clip_high=2.0))
    loss.sum().backward()
    assert clipped.tolist() == [False, False, True]
    assert asked.logprob_M.grad is not None
    assert asked.logprob_M.grad.tolist() == pytest.approx([-0.5, 2, -3])


def test_the_gate_of_sapo_fades_by_the_sign_of_the_advantage() -> None:
    """The slope is 1 at a ratio of 1, and elsewhere 4 f (1 - f) of the sigmoid's value f."""
    asked = actions(floats(1, 3, 3), floats(1, 1, -1), Rows(torch.arange(3), 3))
    loss, _ = sapo.loss(asked, Hyperparameters(tau_pos=1.0, tau_neg=2.0))
    loss.sum().backward()
    soft = [1 / (1 + math.exp(-tau * 2)) for tau in (1, 2)]
    assert loss.tolist() == pytest.approx([-2, -4 * soft[0], 2 * soft[1]])
    assert asked.logprob_M.grad is not None
    slopes = [4 * each * (1 - each) * 3 for each in soft]
    assert asked.logprob_M.grad.tolist() == pytest.approx([-1, -slopes[0], slopes[1]])


def test_gmpo_clips_on_the_side_of_the_advantage_and_stays_finite() -> None:
    """A ratio that is too large is clipped where the advantage is positive, and one that is too small
    where it is negative."""
    rows = Rows(torch.tensor([0, 0, 1, 1, 2]), 3)
    asked = actions(floats(1, 1, 1, 1, 1), floats(1, 1, -1, -1, -1), rows)
    asked = replace(asked, log_ratio_M=floats(1, -1, 1, -1, 800))
    loss, clipped = gmpo.loss(asked, Hyperparameters(clip_low=0.4, clip_high=0.4))
    assert clipped.tolist() == [True, False, False, True, False]
    first, second, last = math.exp((0.4 - 1) / 2), math.exp((1 - 0.4) / 2), math.exp(20)
    assert loss.tolist() == pytest.approx([-first, -first, second, second, last])


def test_dppo_masks_only_what_would_go_further_away() -> None:
    """Probabilities of 0.37 before, and 0.74 or 0.04 now."""
    asked = actions(floats(2, 2, 0.1, 0.1), floats(1, -1, 1, -1), Rows(torch.arange(4), 4))
    bounded = partial(Hyperparameters, clip_low=0.1, clip_high=0.1)
    for bounds in (bounded(divergence="tv"), bounded(divergence="kl")):
        _, masked = dppo.loss(asked, bounds)
        assert masked.tolist() == [True, False, False, True]
        _, masked = dppo.loss(asked, replace(bounds, clip_low=9.0, clip_high=9.0))
        assert not masked.any()
    loss, _ = dppo.loss(asked, Hyperparameters(clip_low=0.3, clip_high=0.3))
    loss.sum().backward()
    assert asked.logprob_M.grad is not None
    assert asked.logprob_M.grad.tolist() == pytest.approx([0, 2, -0.1, 0])


def test_gpg_makes_up_for_groups_that_are_equal() -> None:
    """Two of three groups are equal, one of them at 1, and one sample has no reward."""
    before = BatchBeforeUpdate(
        [0, 0, 1, 1, 2, 2, 2], [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, None], torch.arange(7)
    )
    found = gpg.OBJECTIVE.estimate(before, gpg.OBJECTIVE.defaults).advantage_E
    assert found.tolist() == pytest.approx([-0.5 * 3, 0.5 * 3, 0, 0, 0, 0, 0])


def test_gdpo_weighs_samples_equally_however_long_they_are() -> None:
    """Samples of 1, 3 and 1 actions. The sums are 1.5, -1.5 and 0, and their deviation is 1.5."""
    before = BatchBeforeUpdate(
        [0, 0, 1],
        [1.0, 0.0, 1.0],
        torch.tensor([0, 1, 1, 1, 2]),
        parts={"right": [1.0, 0.0, 1.0], "short": [8.0, 2.0, 5.0]},
    )
    half = 1.5 / math.sqrt(2)
    weights = Hyperparameters(part_weights=(("right", half), ("short", half)))
    found = gdpo.OBJECTIVE.estimate(before, weights).advantage_E
    assert found.tolist() == pytest.approx([1, -1, -1, -1, 0], abs=1e-5)


def test_a_value_may_only_come_so_near() -> None:
    loss, clipped = value_loss(floats(3.0, 0.1), floats(0, 0), floats(4, 4), clip=0.5)
    assert loss.tolist() == pytest.approx([3.5**2 / 2, 3.9**2 / 2])
    assert clipped.tolist() == [True, False]


TALK = tuple(
    Conversation(i, (("user", f"{i}?"), ("assistant", "yes" * (1 + 3 * i)))) for i in range(3)
)


def test_micro_batches_change_nothing_in_sft() -> None:
    found = []
    for tokens in (4096, 1):
        policy = policy64()
        base = policy.loaded.base
        batch = sft.demonstrations_of(
            TALK, Chat(base.tokenizer, base.stop_ids), Advanced(algorithm="sft")
        )
        metrics, _ = sft.accumulate_gradients(policy, batch, micro_batch_tokens=tokens)
        found.append((metrics["train/loss"], {n: t.grad for n, t in policy.tensors.items()}))
    (whole, gradients_of), (split, others) = found
    assert split == pytest.approx(whole, abs=1e-9)
    for name, gradient in gradients_of.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-9, rtol=0)


def test_in_sft_the_prompt_is_context(chat: Chat) -> None:
    batch = sft.demonstrations(chat, TALK[:1], max_tokens=64, learned="assistant")
    (row,) = batch.examples
    answer = [*chat.encode("yes"), 6]
    (micro,) = pack([row], micro_batch_tokens=99, share=True)
    assert micro.target_M.tolist() == answer
    assert Example(0, row.sequence).num_actions == len(answer)


def test_every_end_token_of_the_model_ends_a_turn() -> None:
    base = build_base(TINY, {}, device=torch.device("cpu"))
    model: Any = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[2, 5]))
    assert _stop_ids(model, base.tokenizer) == {2, 5, 6}


async def test_the_sampler_answers_with_the_version_it_was_asked_for(
    engine: Engine, shelf: Shelf
) -> None:
    """The base and two versions of an adapter, the same prompt: each at the logprobs that the learner
    computes for that version, to 1e-6."""
    asked = job(seed=1)
    states = [(await engine.learner.initialize(asked)).state]
    for step in (1, 2):
        states.append((await engine.learner.step(asked, play(step), export_state=True)).state)
    policies = [PolicyRef(version=0), *(shelf.policy(state) for state in states[1:])]
    turns = [
        await engine.sampler.sample(request(policy=p, sample=3, max_new_tokens=12))
        for p in policies
    ]
    loaded = await engine.sampler._cache.load_model(TINY)
    for policy, turn in zip(policies, turns, strict=True):
        tensors = await engine.sampler._cache.load_tensors(policy)
        found = learner_logprobs(loaded, tensors, turn)
        assert turn.logprobs == pytest.approx(found, abs=1e-6)
    assert len({turn.logprobs for turn in turns}) == 3


def learner_logprobs(loaded: Any, tensors: dict[str, torch.Tensor], turn: Any) -> list[float]:
    """Of the turn's tokens, through Transformers and peft."""
    ids = torch.tensor([*turn.prompt_ids, *turn.completion_ids])
    with torch.no_grad():
        output, _ = loaded.fallback._call(tensors, Scaling(8.0), input_ids=ids[None])
    logprobs = output.logits[0, len(turn.prompt_ids) - 1 : -1].double().log_softmax(-1)
    chosen = logprobs.gather(-1, ids[len(turn.prompt_ids) :, None])[:, 0]
    return [float(value) for value in chosen]


async def test_the_learning_rate_is_that_of_the_step_after_a_resume_too(engine: Engine) -> None:
    asked = job(warmup_steps=2, lr_schedule="linear", total_steps=4)
    state = (await engine.learner.initialize(asked)).state
    rates = []
    for step in range(1, 5):
        await engine.learner.load(asked, state)
        result = await engine.learner.step(asked, play(step), export_state=True)
        state = result.state
        rates.append(result.metrics["train/lr"])
    advanced = asked.config.advanced
    expected = [lr_at(s, total_steps=4, peak=1e-2, advanced=advanced) for s in range(1, 5)]
    assert rates == expected
    assert len(set(rates)) > 1


def test_a_large_gradient_is_clipped_before_the_moments_see_it() -> None:
    """One step of Adam does not depend on the scale of its gradients; two do."""
    ours, theirs = leaves(3.0), leaves(3.0)
    adam = torch.optim.AdamW(theirs.values(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer = Optimizer.fresh(ours, job())
    for size in (3.0, 0.01):
        for tensor in (*ours.values(), *theirs.values()):
            tensor.grad = torch.full_like(tensor, size)
        optimizer.update(lr=0.1, clip=0.5)
        torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.5)
        adam.step()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])
