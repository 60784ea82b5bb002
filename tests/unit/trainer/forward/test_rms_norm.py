"""The hand-written gradient of the norm, against autograd's own."""

import pytest
import torch
import torch.nn.functional as F

from trainer.forward.rms_norm import rms_norm


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 16)])
def test_value_and_gradients_are_those_of_torch(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    ours = rms_norm(x, weight, 1e-5)
    theirs = F.rms_norm(x, shape[-1:], weight, 1e-5)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    for mine, expected in zip(
        torch.autograd.grad(ours, (x, weight), grad),
        torch.autograd.grad(theirs, (x, weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, atol=1e-12, rtol=0)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    rms_norm(x, torch.ones(4), 1e-6).sum().backward()
    assert x.grad is not None
    assert torch.autograd.gradcheck(
        lambda y: rms_norm(y, torch.ones(4, dtype=torch.float64), 1e-6),
        torch.randn(2, 4, dtype=torch.float64, requires_grad=True),
    )
