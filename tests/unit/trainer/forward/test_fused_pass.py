"""The learner's fused pass against the plain one, in float64: values, and gradients of every
adapter."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedConfig

from tests.unit.trainer.sampler.test_decode_model import (
    QWEN2,
    QWEN3,
    _llama,
    base_of,
    decoder,
    views,
)
from trainer.forward import fused_pass
from trainer.forward.decoder import Attend, causal_attend
from trainer.forward.fused_pass import can_fuse, fused_hidden
from trainer.forward.ops import Forward
from trainer.forward.weights import Trainable
from trainer.model.base import Base

TOKENS, POSITIONS = torch.arange(20) * 5 % 103, torch.arange(20)


def leaves(view: Trainable) -> list[torch.Tensor]:
    return [tensor.requires_grad_() for pair in view.pairs.values() for tensor in pair]


def gradients(hidden: torch.Tensor, trained: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3)).double()
    return list(torch.autograd.grad((hidden * weights).sum(), trained))


def causal(base: Base) -> Attend:
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    return causal_attend(mask, kv_heads=decoder(base).kv_heads)


@pytest.mark.parametrize("config", [_llama, QWEN2, QWEN3])
@pytest.mark.parametrize("adapted", ["nothing", "all-linear", "some"])
@pytest.mark.parametrize("recompute", [False, True])
def test_values_and_gradients_are_those_of_the_plain_pass(
    config: Callable[[], PreTrainedConfig], adapted: str, recompute: bool
) -> None:
    base = base_of(config)
    view, shape, attend = views(base)[adapted], decoder(base), causal(base)
    trained = leaves(view)
    expected = shape.hidden_states(view, TOKENS, POSITIONS, attend)
    found = fused_hidden(shape, view, TOKENS, POSITIONS, attend, Forward(recompute=recompute))
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)
    assert found.requires_grad == bool(trained)
    for mine, theirs in zip(
        *(gradients(x, trained) if trained else [] for x in (found, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


def test_full_large_or_coarse_training_takes_the_plain_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = base_of(QWEN3)
    found = views(base)
    shape = decoder(base)
    assert all(can_fuse(shape, found[n], num_bytes=1) for n in ("nothing", "all-linear", "some"))
    assert not can_fuse(shape, found["full"], num_bytes=1), "its weights need gradients"
    assert not can_fuse(shape, replace(found["some"], dtype=torch.bfloat16), num_bytes=1)
    monkeypatch.setattr(fused_pass, "COPY_BYTES", 1)
    assert not can_fuse(shape, found["some"], num_bytes=2)


def test_the_tensors_of_a_version_are_left_as_they_are() -> None:
    base = base_of(QWEN3)
    view, shape = views(base)["all-linear"], decoder(base)
    trained = leaves(view)
    before = [t.clone() for t in (*view.base.values(), *(x.detach() for x in trained))]
    hidden = fused_hidden(shape, view, TOKENS, POSITIONS, causal(base), Forward())
    gradients(hidden, trained)
    after = [*view.base.values(), *trained]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
