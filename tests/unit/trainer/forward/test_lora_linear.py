"""The hand-written gradient of projections with adapters, against autograd's own."""

import pytest
import torch
import torch.nn.functional as F

from trainer.forward.lora_linear import AdaptedLinear, project

TOKENS, INPUTS, SCALE = 6, 5, 1.7


def drawn(*shape: int, seed: int, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def modules() -> list[AdaptedLinear]:
    """Three modules of several widths and ranks, one with a bias."""
    return [
        AdaptedLinear(
            drawn(wide, INPUTS, seed=wide),
            drawn(wide, seed=wide + 1) if wide == 3 else None,
            drawn(rank, INPUTS, seed=wide + 2, grad=True),
            drawn(wide, rank, seed=wide + 3, grad=True),
        )
        for wide, rank in ((3, 2), (7, 2), (4, 1))
    ]


def plain(x: torch.Tensor, module: AdaptedLinear) -> torch.Tensor:
    return F.linear(x, module.weight, module.bias) + SCALE * (x @ module.a.t()) @ module.b.t()


@pytest.mark.parametrize("num", [1, 2, 3])
def test_values_and_gradients_are_those_of_torch(num: int) -> None:
    x, chosen = drawn(TOKENS, INPUTS, seed=0, grad=True), modules()[:num]
    ours = project(x, chosen, scale=SCALE)
    theirs = [plain(x, module) for module in chosen]
    leaves = [x, *(tensor for module in chosen for tensor in (module.a, module.b))]
    weights = [drawn(*y.shape, seed=9 + i) for i, y in enumerate(theirs)]
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-12, rtol=0)
    grads = [
        torch.autograd.grad([(y * w).sum() for y, w in zip(ys, weights, strict=True)], leaves)
        for ys in (ours, theirs)
    ]
    for mine, expected in zip(*grads, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-12, rtol=0)


def test_an_output_that_nobody_uses_changes_nothing() -> None:
    x, chosen = drawn(TOKENS, INPUTS, seed=0, grad=True), modules()
    project(x, chosen, scale=SCALE)[1].sum().backward()
    mine, x.grad = x.grad, None
    plain(x, chosen[1]).sum().backward()
    torch.testing.assert_close(mine, x.grad, atol=1e-12, rtol=0)


def test_an_input_without_a_gradient_costs_none() -> None:
    """The first layer reads frozen embeddings."""
    x, chosen = drawn(TOKENS, INPUTS, seed=0), modules()
    torch.stack([y.sum() for y in project(x, chosen, scale=SCALE)]).sum().backward()
    assert x.grad is None
    assert all(module.a.grad is not None and module.b.grad is not None for module in chosen)
