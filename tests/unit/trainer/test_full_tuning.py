"""Full tuning has the same gradients on the lean decoder and through Transformers, for every row of
the embedding. That includes the row of the padding token, which often is also the token that ends a
turn."""

from dataclasses import replace

import pytest
import torch

from schemas.learner import GradedGroup
from schemas.sampling import SampleRecord
from schemas.sampling import Sequence as Row
from tests.unit.trainer.batches import CPU, accumulate_grpo, policy64
from tests.unit.trainer.support import TINY, job
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import build_base
from trainer.objective.hyperparameters import Hyperparameters
from trainer.policy import LoadedModel, Policy, fresh_policy

EMBEDDING = "model.embed_tokens.weight"
PAD = build_base(TINY, {}, device=CPU).tokenizer.pad_token_id


def groups() -> tuple[GradedGroup, ...]:
    """Samples whose history holds the padding token."""
    rows = [
        Row(tokens=(3, PAD, 9, 20 + i, PAD, 30), loss_mask=(0, 0, 0, 1, 1, 1), logprobs=(-4.0,) * 6)
        for i in range(3)
    ]
    samples = tuple(SampleRecord(index=i, sequences=(row,)) for i, row in enumerate(rows))
    return (GradedGroup(0, samples, (1.0, 0.0, 0.3)),)


def trained(*, lean: bool, rules: int = 2) -> dict[str, torch.Tensor]:
    """The gradients of a step on all weights, in float64."""
    base = policy64().loaded
    loaded = LoadedModel(base.base, base.decoder if lean else None, Fallback(base.base))
    policy: Policy = fresh_policy(loaded, replace(job(tuning="full"), rules=rules))
    for tensor in policy.tensors.values():
        tensor.requires_grad_()
    accumulate_grpo(policy, groups(), Hyperparameters())
    return {name: t.grad for name, t in policy.tensors.items() if t.grad is not None}


def test_the_decoder_and_transformers_give_the_same_gradients() -> None:
    lean, plain = trained(lean=True), trained(lean=False)
    assert lean.keys() == plain.keys()
    for name, gradient in lean.items():
        torch.testing.assert_close(plain[name], gradient, atol=1e-6, rtol=1e-5)
    assert float(lean[EMBEDDING][PAD].abs().max()) > 1e-4


def test_twin_by_rules_1_the_row_that_pads_was_left_out() -> None:
    now, before = trained(lean=False), trained(lean=False, rules=1)
    rows = [
        n
        for n in range(len(now[EMBEDDING]))
        if not torch.equal(now[EMBEDDING][n], before[EMBEDDING][n])
    ]
    assert rows == [PAD]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            before[EMBEDDING], trained(lean=True)[EMBEDDING], atol=1e-6, rtol=1e-5
        )
