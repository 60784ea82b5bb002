"""Mini-batches: how a step is divided, and a whole step against a loop of torch written by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from schemas.learner import GradedGroup, LearnerJob
from schemas.sampling import SampleRecord
from tests.unit.trainer.batches import group, policy64, rewritten
from tests.unit.trainer.support import job
from trainer import grpo
from trainer.algorithms.registry import OBJECTIVES, hyperparameters_of
from trainer.forward.packing import Example, pack
from trainer.objective.batch import examples_of, minibatches_of
from trainer.optimizer import Optimizers, step_size_at
from trainer.policy import Policy

FIVE = (
    group(0, (1.0, 0.0, 0.5)),
    group(1, (0.0, 1.0, 1.0), empty=2),
    rewritten(3, (0.2, 0.9, -0.4)),
    group(2, (None, 0.3, 0.7)),
    group(4, (0.1, 0.0, 2.0)),
)
SLOTS = [0, 1, 3, 2, 4]
RATE: dict[str, Any] = {"grad_clip": 0.05, "weight_decay": 0.1}


def slots_of(groups: Sequence[GradedGroup], most: int | None) -> list[list[int]]:
    """The slots of the groups in each mini-batch."""
    examples = examples_of(groups)
    of_sample = [group.slot for group in groups for _ in group.samples]
    return [
        list(dict.fromkeys(of_sample[row.sample] for row in rows))
        for rows in minibatches_of(groups, examples, most=most)
    ]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (None, [SLOTS]),
        (9, [SLOTS]),
        (5, [SLOTS]),
        (4, [[0, 1], [3, 2, 4]]),
        (3, [[0, 1], [3, 2, 4]]),
        (2, [[0], [1, 3], [2, 4]]),
        (1, [[0], [1], [3], [2], [4]]),
    ],
)
def test_groups_stay_whole_and_a_remainder_is_distributed(
    most: int | None, expected: list[list[int]]
) -> None:
    assert slots_of(FIVE, most) == expected


def test_groups_without_an_action_are_in_no_mini_batch() -> None:
    silent = GradedGroup(7, (SampleRecord(index=0), SampleRecord(index=1)), (0.0, 1.0))
    assert slots_of((FIVE[0], silent, FIVE[1], silent), 1) == [[0], [1]]
    assert slots_of((silent, silent), 1) == [[]]
    assert slots_of((), 2) == [[]]


@dataclass(frozen=True)
class Sampled:
    """One row, and what stays constant over the updates."""

    sample: int
    row: Example
    advantage: float
    behaviour: torch.Tensor
    proximal: torch.Tensor


def logprobs_of(policy: Policy, row: Example) -> torch.Tensor:
    """The log-probabilities of a row's actions, computed from all logits of this row alone."""
    (micro,) = pack([row], micro_batch_tokens=9999, share=False)
    every = policy.logits(micro).log_softmax(-1)
    return every.gather(-1, micro.target_M[:, None])[:, 0]


def sampled(policy: Policy, group: GradedGroup) -> list[Sampled]:
    found = []
    for n, (sample, advantage) in enumerate(
        zip(group.samples, grpo.advantages(group.rewards), strict=True)
    ):
        for sequence in sample.sequences:
            row = Example(n, sequence)
            if not row.num_actions:
                continue
            logprobs = [p for m, p in zip(sequence.loss_mask, sequence.logprobs, strict=True) if m]
            mu = torch.tensor(logprobs, dtype=torch.float64)
            found.append(Sampled(n, row, advantage, mu, logprobs_of(policy, row).detach()))
    return found


def loss_by_hand(
    policy: Policy, groups: Sequence[Sequence[Sampled]], aggregation: str, correction: str
) -> torch.Tensor:
    """The loss of one mini-batch: everything is divided by what is in this mini-batch."""
    lengths: dict[tuple[int, int], int] = {}
    for n, rows in enumerate(groups):
        for one in rows:
            key = (n, one.sample)
            lengths[key] = lengths.get(key, 0) + one.row.num_actions
    total, loss = sum(lengths.values()), torch.zeros((), dtype=torch.float64)
    for n, rows in enumerate(groups):
        for one in rows:
            share = {
                "token_mean": 1 / total,
                "sequence_mean": 1 / (len(lengths) * lengths[(n, one.sample)]),
                "constant": 1 / (len(lengths) * 8),
            }[aggregation]
            now = logprobs_of(policy, one.row)
            against = one.behaviour if correction == "ratio" else one.proximal
            ratio = (now - against).exp()
            weight = 1.0 if correction == "ratio" else (one.proximal - one.behaviour).exp()
            free, bound = ratio * one.advantage, ratio.clamp(0.8, 1.2) * one.advantage
            loss = loss - share * (weight * torch.minimum(free, bound)).sum()
    return loss


def scale_down(tensors: Sequence[torch.Tensor], most: float) -> None:
    """torch's own clip adds 1e-6 to the norm."""
    norm = torch.stack([t.grad.square().sum() for t in tensors if t.grad is not None]).sum().sqrt()
    for tensor in tensors:
        assert tensor.grad is not None
        tensor.grad *= (most / norm).clamp(max=1.0)


def train_by_hand(
    policy: Policy, sizes: Sequence[int], *, epochs: int, aggregation: str, correction: str
) -> list[float]:
    """Train with `sizes` groups in each mini-batch. Returns the loss of each update."""
    tensors = list(policy.tensors.values())
    adam = torch.optim.AdamW(tensors, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    groups = [sampled(policy, group) for group in FIVE]
    losses = []
    for _ in range(epochs):
        first = 0
        for size in sizes:
            adam.zero_grad()
            here = groups[first : first + size]
            loss = loss_by_hand(policy, here, aggregation, correction)
            loss.backward()
            scale_down(tensors, 0.05)
            adam.step()
            losses.append(float(loss.detach()))
            first += size
    return losses


def train(policy: Policy, asked: LearnerJob, **changes: Any) -> dict[str, float]:
    """One step of `trainer/grpo.py`. Returns its metrics."""
    hyperparameters = hyperparameters_of(asked.config, micro_batch_tokens=40)
    metrics, _ = grpo.step(
        policy,
        Optimizers.fresh(policy, asked),
        FIVE,
        objective=OBJECTIVES[asked.config.advanced.algorithm],
        hyperparameters=replace(hyperparameters, **changes),
        step_size=step_size_at(1, asked),
    )
    return metrics


@pytest.mark.parametrize("correction", ["ratio", "decoupled"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_a_step_equals_a_loop_of_torch_written_by_hand(aggregation: str, correction: str) -> None:
    """Five groups at most two at a time make three mini-batches, and each epoch visits all of them."""
    asked = job(
        minibatch_size=16,
        updates_per_step=2,
        loss_aggregation=aggregation,
        correction=correction,
        **RATE,
    )
    ours, theirs = policy64(), policy64()
    before = {name: tensor.detach().clone() for name, tensor in ours.tensors.items()}
    metrics = train(ours, asked)
    options: dict[str, Any] = {"aggregation": aggregation, "correction": correction}
    losses = train_by_hand(theirs, (1, 2, 2), epochs=2, **options)
    assert metrics["train/loss"] == pytest.approx(sum(losses) / 6, abs=1e-9)
    for name, tensor in ours.tensors.items():
        torch.testing.assert_close(tensor, theirs.tensors[name], atol=1e-9, rtol=0)
        assert float((tensor.detach() - before[name]).abs().max()) > 1e-3, name


def test_the_first_update_is_on_policy_to_the_last_bit() -> None:
    """pi_prox is measured with the packing of the mini-batches, so every ratio is exactly 1 before
    the first update."""
    policy = policy64()
    asked = job(minibatch_size=16, correction="decoupled")
    batch = grpo.prepare_batch(
        policy,
        FIVE,
        objective=grpo.OBJECTIVE,
        hyperparameters=hyperparameters_of(asked.config, micro_batch_tokens=40),
    )
    parts = batch.split()
    assert len(parts) == 3
    for part in parts:
        for micro, values in part.micro_batches(policy):
            now, _ = policy.logprobs(micro, temperature=1.0)
            assert torch.equal(now.detach(), values["proximal"])


def test_one_pass_in_mini_batches_is_off_policy() -> None:
    """With a correction, the ratio of the second mini-batch is taken against the policy before the
    first, also in a single pass. So a clip that nothing passes takes effect, as with two passes."""
    narrow: dict[str, Any] = {
        "correction": "decoupled",
        "clip_low": 1e-6,
        "clip_high": 1e-6,
        **RATE,
    }
    once = train(policy64(), job(**narrow))
    divided = train(policy64(), job(minibatch_size=8, **narrow))
    assert once["train/clip_ratio"] == 0.0
    assert divided["train/clip_ratio"] > 0.1


@pytest.mark.parametrize("algorithm", ["reinforce_plus_plus", "gpg", "ppo"])
def test_advantages_are_those_of_the_whole_step(algorithm: Any) -> None:
    """Also where the batch is the baseline. Whitened over a mini-batch, they would be others."""
    found = []
    for size in (None, 8):
        config = job(algorithm=algorithm, minibatch_size=size).config
        batch = grpo.prepare_batch(
            policy64(),
            FIVE,
            objective=OBJECTIVES[algorithm],
            hyperparameters=hyperparameters_of(config, micro_batch_tokens=4096),
        )
        assert len(batch.split()) == (1 if size is None else 5)
        found.append(batch.values_E["advantage"])
    torch.testing.assert_close(found[0], found[1], atol=1e-9, rtol=0)


def poison(update: int) -> Callable[..., Any]:
    """`accumulate_gradients`, whose loss is not finite in the given update."""
    accumulate, seen = grpo.accumulate_gradients, [0]

    def poisoned(*given: Any) -> Any:
        metrics, plan = accumulate(*given)
        seen[0] += 1
        return (metrics | {"train/loss": float("nan")} if seen[0] == update else metrics), plan

    return poisoned


@pytest.mark.parametrize("update", [1, 2, 5])
def test_an_update_that_is_not_finite_undoes_those_of_other_mini_batches(
    monkeypatch: pytest.MonkeyPatch, update: int
) -> None:
    policy = policy64()
    before = {name: tensor.detach().clone() for name, tensor in policy.tensors.items()}
    asked = job(minibatch_size=8, **RATE)
    monkeypatch.setattr(grpo, "accumulate_gradients", poison(update))
    assert train(policy, asked)["train/skipped"] == 1.0
    for name, tensor in before.items():
        assert torch.equal(tensor, policy.tensors[name]), name
    monkeypatch.undo()
    assert train(policy, asked)["train/skipped"] == 0.0
    assert any(not torch.equal(tensor, policy.tensors[name]) for name, tensor in before.items())
