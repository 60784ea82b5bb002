"""The schedule, the clipping, and AdamW against torch's own."""

import pytest
import torch

from tests.unit.trainer.support import job
from trainer.optimizer import Optimizer, lr_at


def rates(total: int, **advanced: object) -> list[float]:
    section = job(**advanced).config.advanced
    return [lr_at(s, total_steps=total, peak=1.0, advanced=section) for s in range(1, total + 1)]


def test_constant() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warmup_reaches_the_peak_and_linear_never_wastes_a_step() -> None:
    assert rates(6, warmup_steps=2, lr_schedule="linear") == pytest.approx(
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    )


def test_cosine_stays_above_its_floor() -> None:
    values = rates(50, lr_schedule="cosine", lr_min_ratio=0.1)
    assert values[0] == 1.0
    assert values == sorted(values, reverse=True)
    assert 0.1 < values[-1] < 0.11


def test_a_warmup_longer_than_the_run() -> None:
    assert rates(2, warmup_steps=9) == [0.5, 1.0]


def leaves(grad: float) -> dict[str, torch.Tensor]:
    tensors = {n: torch.linspace(-1, 1, 4) * (i + 1) for i, n in enumerate("ab")}
    for tensor in tensors.values():
        tensor.requires_grad_()
        tensor.grad = torch.full((4,), grad)
    return tensors


def test_a_step_is_adamw_with_the_global_norm_clipped() -> None:
    ours, theirs = leaves(3.0), leaves(3.0)
    adam = torch.optim.AdamW(theirs.values(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.2)
    optimizer = Optimizer.fresh(ours, job(weight_decay=0.2))
    norm = optimizer.take(lr=0.1, clip=0.5)
    torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.5)
    adam.step()
    assert norm == pytest.approx(3.0 * 8**0.5)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])
    assert all(tensor.grad is None for tensor in ours.values())


@pytest.mark.parametrize(("algorithm", "beta2"), [("grpo", 0.95), ("sft", 0.98)])
def test_the_second_beta_follows_the_algorithm(algorithm: str, beta2: float) -> None:
    group = Optimizer.fresh(leaves(1.0), job(algorithm=algorithm)).adam.param_groups[0]
    assert group["betas"] == (0.9, beta2)
    given = Optimizer.fresh(leaves(1.0), job(adam_beta2=0.5)).adam.param_groups[0]
    assert given["betas"] == (0.9, 0.5)
