"""Online DPO: which samples of a group are the pair, and that their loss is DPO's."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from schemas.config import Advanced
from schemas.learner import GradedGroup, StepBatch
from schemas.sampling import SampleRecord
from tests.unit.trainer.batches import group, policy64, rewritten
from tests.unit.trainer.preferences.test_step import run_of, scored
from tests.unit.trainer.support import job
from trainer.engine import Engine
from trainer.objective.metrics import Means
from trainer.optimizer import Optimizers, StepSize
from trainer.policy import Policy
from trainer.preferences.batch import PreferenceBatch, micro_batches
from trainer.preferences.online_dpo import pair_of, pairs_of
from trainer.preferences.step import PreferenceRun, micro_batch_loss, step

NAN, INF = math.nan, math.inf
GROUPS = (
    group(0, (1.0, 0.0, 0.5, None)),
    group(1, (1.0, 1.0, 1.0)),
    rewritten(2, (0.2, 0.9, -0.4)),
)


@pytest.mark.parametrize(
    ("rewards", "pair"),
    [
        ((0.2, 0.9, -0.4), (1, 2)),
        ((1.0, 0.0, 1.0, 0.0), (0, 1)),
        ((0.0, 1.0, 0.0, 1.0), (1, 0)),
        ((0.5, 0.5, 0.5), None),
        ((0.5, None, 0.1), (0, 2)),
        ((0.5, None, None), None),
        ((NAN, 0.3, INF, 0.1, -INF), (1, 3)),
        ((None, None), None),
        ((-0.0, 0.0), None),
    ],
)
def test_the_pair_is_the_first_of_the_best_and_the_first_of_the_worst(
    rewards: tuple[float | None, ...], pair: tuple[int, int] | None
) -> None:
    assert pair_of(group(0, rewards)) == pair


def test_a_sample_without_a_chosen_token_is_in_no_pair() -> None:
    """It failed before it answered, and `failed_reward` gave it a reward."""
    assert pair_of(group(0, (1.0, 0.5, -1.0), empty=2)) == (0, 1)
    failed = group(0, (1.0, 0.5, -1.0))
    samples = (*failed.samples[:2], SampleRecord(index=2))
    assert pair_of(replace(failed, samples=samples)) == (0, 1)


def test_the_same_tokens_teach_nothing_whatever_their_rewards() -> None:
    given = group(0, (1.0, 0.0))
    (first, _) = given.samples
    assert pair_of(replace(given, samples=(first, replace_index(first, 1)))) is None


def replace_index(sample: SampleRecord, index: int) -> SampleRecord:
    return sample.model_copy(update={"index": index})


def test_groups_without_a_pair_are_counted_and_the_mean_is_over_the_others() -> None:
    batch = pairs_of(GROUPS)
    assert (len(batch.units), batch.num_losses, batch.num_rows, batch.num_lost) == (2, 2, 3, 1)
    assert [len(unit.examples) for unit in batch.units] == [2, 3], "one sample has two rows"
    cut = GROUPS[0].samples[1].model_copy(update={"truncated": True})
    samples = (GROUPS[0].samples[0], cut, *GROUPS[0].samples[2:])
    assert pairs_of((replace(GROUPS[0], samples=samples),)).num_cut == 1
    assert batch.num_cut == 0


def online(policy: Policy, tokens: int = 4096, temperature: float = 0.7) -> PreferenceRun:
    run = run_of(policy, tokens=tokens, algorithm="online_dpo", beta=0.3)
    return replace(run, temperature=temperature)


def gradients_of(
    policy: Policy, run: PreferenceRun, batch: PreferenceBatch
) -> tuple[dict[str, float], dict[str, torch.Tensor], int]:
    """Metrics and gradients of a step's forward and backward, and its number of micro-batches."""
    for tensor in policy.tensors.values():
        tensor.grad = None
    means, number = Means(), 0
    for micro in micro_batches(policy, batch.units, micro_batch_tokens=run.micro_batch_tokens):
        micro_batch_loss(policy, micro, batch, run, baseline=0.0, means=means).backward()
        number += 1
    found = {n: t.grad.clone() for n, t in policy.tensors.items() if t.grad is not None}
    return means.values(), found, number


def expected_loss(policy: Policy, groups: Sequence[GradedGroup], temperature: float) -> float:
    """By hand: single passes over all rows of both samples, with and without the adapter."""
    losses = []
    for one in groups:
        if (pair := pair_of(one)) is None:
            continue
        ratios = []
        for place in pair:
            rows = [e for unit in pairs_of((one,)).units for e in unit.examples]
            own = [e for e in rows if e.sample == place]
            ratios.append(
                sum(
                    scored(policy, e, temperature=temperature)[0]
                    - scored(policy, e, reference=True, temperature=temperature)[0]
                    for e in own
                )
            )
        losses.append(float(-F.logsigmoid(torch.tensor(0.3 * (ratios[0] - ratios[1])).double())))
    return math.fsum(losses) / len(losses)


def test_the_loss_is_that_of_single_passes_at_the_temperature_of_the_samples() -> None:
    policy = policy64()
    for temperature in (0.7, 1.0):
        run = online(policy, temperature=temperature)
        metrics, _, _ = gradients_of(policy, run, pairs_of(GROUPS))
        wanted = expected_loss(policy, GROUPS, temperature)
        assert metrics["train/loss"] == pytest.approx(wanted, abs=1e-6)
    assert abs(expected_loss(policy, GROUPS, 0.7) - expected_loss(policy, GROUPS, 1.0)) > 1e-4


def test_micro_batches_change_nothing_and_divide_no_pair() -> None:
    policy = policy64()
    whole, gradients, number = gradients_of(policy, online(policy), pairs_of(GROUPS))
    split, others, parts = gradients_of(policy, online(policy, tokens=1), pairs_of(GROUPS))
    assert (number, parts) == (1, 2)
    assert split == pytest.approx(whole, abs=1e-11)
    assert gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-11, rtol=0)


async def test_a_step_learns_from_its_groups_and_a_flat_one_changes_nothing(
    engine: Engine,
) -> None:
    asked = job(algorithm="online_dpo", total_steps=4)
    zero = await engine.learner.initialize(asked)
    flat = StepBatch(1, groups=(GROUPS[1],))
    first = await engine.learner.step(asked, flat, export_state=False)
    assert first.state.weights == zero.state.weights
    assert first.metrics["train/unlearned_ratio"] == 1.0
    assert (first.plan, first.metrics["train/grad_norm"]) == ((), 0.0)
    found = [
        await engine.learner.step(asked, StepBatch(n, groups=GROUPS), export_state=False)
        for n in (2, 3, 4)
    ]
    losses = [result.metrics["train/loss"] for result in found]
    assert losses[0] == pytest.approx(math.log(2))
    assert losses == sorted(losses, reverse=True)
    assert found[0].metrics["rewards/accuracies"] == 0.0
    assert found[2].metrics["rewards/accuracies"] == 1.0
    assert found[0].metrics["train/unlearned_ratio"] == pytest.approx(1 / 3)
    assert found[0].metrics["train/sampler_mismatch"] > 0
    assert found[0].metrics["rollout/turn_reward"] == pytest.approx(0.34)


def test_a_loss_that_is_not_finite_skips_the_step() -> None:
    policy = policy64()
    with torch.no_grad():
        next(iter(policy.tensors.values())).fill_(math.nan)
    asked = job(algorithm="online_dpo")
    optimizers = Optimizers.fresh(policy, asked)
    size = StepSize(lr=1e-2, grad_clip=1.0, critic_lr=1e-2)
    metrics, _ = step(
        policy, optimizers, StepBatch(1, groups=GROUPS), online(policy), step_size=size
    )
    assert metrics["train/skipped"] == 1.0


def test_its_settings_are_those_of_dpo() -> None:
    policy = policy64()
    own = run_of(policy, algorithm="online_dpo", preference_loss="ipo", beta=0.5)
    assert own.settings == run_of(policy, algorithm="dpo", preference_loss="ipo", beta=0.5).settings
    assert Advanced(algorithm="online_dpo").beta is None
