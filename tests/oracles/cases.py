"""Batches of numbers that our trainer and the oracles can read: float64, B rows of T positions.

A row is a sample with T answer positions, and `mask` says which of them are actions. `now` are the
log-probabilities that are trained. `behaviour`, `proximal` and `reference` are those of mu, pi_prox and
pi_ref. Hypothesis draws shapes, masks with empty rows and holes, log-ratios at both sides of the edges
of the clips and far beyond, and rewards that are missing or not finite.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from schemas.errors import FailureCategory
from schemas.learner import GradedGroup
from schemas.sampling import SampleFailure, SampleRecord
from schemas.sampling import Sequence as Row
from trainer import grpo
from trainer.forward.packing import MicroBatch
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import Objective

EDGES = (0.8, 1.2, 1.28, 5.0, 2.0, 0.5, 4.0, 1.0, 1 - 3e-4, 1 + 4e-4)
"""Ratios at which something is clipped, bounded or masked."""

BESIDE = (1e-9, -1.7e-9)
"""How far a log-ratio is from an edge. Exactly on the edge rounding alone decides what is clipped."""

FAILED = SampleFailure(category=FailureCategory.AGENT, message="it raised")

PROMPT = 2
"""Tokens before the answer of each row."""


@dataclass(frozen=True, eq=False)
class Case:
    """`rewards` by row; rows 0 ... size - 1 are the first group, and so on."""

    size: int
    rewards: tuple[float | None, ...]
    mask: torch.Tensor
    now: torch.Tensor
    behaviour: torch.Tensor
    proximal: torch.Tensor
    reference: torch.Tensor
    value: torch.Tensor | None = None
    """what the critic predicts now; before the step it predicted half of it"""
    entropy: torch.Tensor | None = None
    """of the distribution of each action now; None: 0"""
    micro_batch_tokens: int = 4096
    share: bool = True
    cut: frozenset[int] = frozenset()
    """rows that were cut off at a limit of tokens"""
    failed: frozenset[int] = frozenset()
    """rows whose samples failed, and have a reward nevertheless"""

    @property
    def num_rows(self) -> int:
        return len(self.rewards)

    @property
    def num_live(self) -> int:
        """Rows that have actions."""
        return int((self.mask.sum(-1) > 0).sum())

    @property
    def row_factor(self) -> float:
        """All rows divided by the rows that have actions. The answer of a reference that counts
        rows without actions in its means must be multiplied by it."""
        return self.num_rows / self.num_live

    @property
    def has_reward(self) -> list[bool]:
        return [reward is not None and math.isfinite(reward) for reward in self.rewards]

    @property
    def group(self) -> list[int]:
        return [row // self.size for row in range(self.num_rows)]


@dataclass(frozen=True, eq=False)
class Answer:
    """A loss and its gradient with respect to `now`, which is zero where there is no action."""

    loss: float
    gradient: torch.Tensor
    value_gradient: torch.Tensor | None = None


def answer(case: Case, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> Answer:
    """The loss of a function of `now`, and its gradient at that point."""
    leaf = case.now.clone().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    assert leaf.grad is not None
    return Answer(float(loss.detach()), leaf.grad * (case.mask > 0))


def times(answer: Answer, factor: float) -> Answer:
    """The answer of a reference that divides by another number, multiplied by this factor."""
    return Answer(answer.loss * factor, answer.gradient * factor)


def same(ours: Answer, theirs: Answer, *, atol: float = 1e-9, rtol: float = 1e-12) -> None:
    """Value and gradient agree: to 1e-9, and to rounding where they are large."""
    assert abs(ours.loss - theirs.loss) <= atol + rtol * abs(theirs.loss), (ours.loss, theirs.loss)
    torch.testing.assert_close(ours.gradient, theirs.gradient, atol=atol, rtol=rtol)
    if theirs.value_gradient is not None:
        assert ours.value_gradient is not None
        torch.testing.assert_close(ours.value_gradient, theirs.value_gradient, atol=atol, rtol=rtol)


class TablePolicy:
    """A policy whose log-probabilities are looked up in a table: the token of row b, position t is
    b T + t."""

    shares_prompts = shares_prefixes = True
    device = torch.device("cpu")

    def __init__(self, case: Case) -> None:
        self.case = case
        self.shares_prompts = self.shares_prefixes = case.share
        self.leaf = case.now.clone().requires_grad_()
        self.value_leaf = (
            case.now * 0 if case.value is None else case.value.clone()
        ).requires_grad_()
        self.entropy_leaf = (
            torch.zeros_like(case.now) if case.entropy is None else case.entropy.clone()
        ).requires_grad_()
        self.before = True

    def logprobs(
        self,
        micro: MicroBatch,
        *,
        temperature: float,
        reference: bool = False,
        trains_entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        now = self.case.proximal if self.before else self.leaf
        table = self.case.reference if reference else now
        entropy = self.entropy_leaf if trains_entropy else self.entropy_leaf.detach()
        return table.flatten()[micro.target_M], entropy.flatten()[micro.target_M]

    def logprobs_and_values(
        self, micro: MicroBatch, *, temperature: float, trains_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logprob_M, entropy_M = self.logprobs(
            micro, temperature=temperature, trains_entropy=trains_entropy
        )
        table = self.value_leaf.detach() / 2 if self.before else self.value_leaf
        return logprob_M, entropy_M, table.flatten()[micro.target_M]


def our_answer(case: Case, objective: Objective, hyperparameters: Hyperparameters) -> Answer:
    """Our loss, computed through the whole of `trainer/grpo.py`. pi_prox is measured and pi_theta
    is trained."""
    policy: Any = TablePolicy(case)
    hyperparameters = replace(hyperparameters, micro_batch_tokens=case.micro_batch_tokens)
    batch = grpo.prepare_batch(
        policy, graded_groups(case), objective=objective, hyperparameters=hyperparameters
    )
    policy.before = False
    metrics, _ = grpo.accumulate_gradients(policy, batch)
    gradient = policy.leaf.grad
    assert gradient is not None
    return Answer(metrics["train/loss"], gradient, policy.value_leaf.grad)


def graded_groups(case: Case) -> tuple[GradedGroup, ...]:
    """The case as graded groups of the trainer."""
    width, groups = case.mask.shape[1], list[GradedGroup]()
    for first in range(0, case.num_rows, case.size):
        samples = []
        for index in range(case.size):
            row = first + index
            ids = tuple(row * width + t for t in range(width))
            mask = tuple(int(m) for m in case.mask[row])
            logprobs = tuple(case.behaviour[row].tolist())
            sequence = Row.model_construct(
                tokens=(1 + first,) * PROMPT + ids,
                loss_mask=(0,) * PROMPT + mask,
                logprobs=(0.0,) * PROMPT + logprobs,
            )
            samples.append(
                SampleRecord.model_construct(
                    index=index,
                    sequences=(sequence,),
                    truncated=row in case.cut,
                    failure=FAILED if row in case.failed else None,
                )
            )
        rewards = case.rewards[first : first + case.size]
        groups.append(GradedGroup(len(groups), tuple(samples), rewards))
    return tuple(groups)


finite = st.floats(-2.0, 2.0)
missing = st.sampled_from([None, math.nan, math.inf])
log_ratios = st.one_of(
    st.sampled_from([math.log(edge) + beside for edge in EDGES for beside in BESIDE]),
    st.floats(-0.6, 0.6),
    st.floats(-4.0, 4.0),
)


def matrix(draw: st.DrawFn, of: st.SearchStrategy[float], rows: int, width: int) -> torch.Tensor:
    values = draw(st.lists(of, min_size=rows * width, max_size=rows * width))
    return torch.tensor(values, dtype=torch.float64).view(rows, width)


@st.composite
def cases(draw: st.DrawFn, *, gaps: bool = True, smallest: int = 2) -> Case:
    """Any batch with at least one action. `gaps`: rewards may be missing."""
    size, num_groups, width = (
        draw(st.integers(smallest, 4)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 5)),
    )
    rows = size * num_groups
    mask = matrix(draw, st.sampled_from([0.0, 1.0, 1.0]), rows, width)
    for row in draw(st.sets(st.integers(0, rows - 1), max_size=rows - 1)):
        mask[row] = 0
    if not mask.any():
        mask[-1, -1] = 1
    reward = st.one_of(finite, st.sampled_from([0.0, 1.0]), missing if gaps else finite)
    now = matrix(draw, st.floats(-6.0, -0.05), rows, width)
    return Case(
        size=size,
        rewards=tuple(draw(st.lists(reward, min_size=rows, max_size=rows))),
        mask=mask,
        now=now,
        behaviour=now - matrix(draw, log_ratios, rows, width),
        proximal=now - matrix(draw, log_ratios, rows, width),
        reference=now + matrix(draw, st.floats(-2.0, 2.0), rows, width),
        value=matrix(draw, finite, rows, width),
        micro_batch_tokens=draw(st.sampled_from([1, 12, 4096])),
        share=draw(st.booleans()),
    )
