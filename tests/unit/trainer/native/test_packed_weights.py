"""A base that is packed once, with each adapter's share added, against versions packed from their
own weights."""

import gc
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedConfig

from tests.kit.postgres import missing
from tests.unit.trainer.native.test_decode import LLAMA, QWEN2, QWEN3
from tests.unit.trainer.sampler.test_decode_model import base_of, decoder
from trainer.forward.weights import FUSED, Trainable, trainable_view
from trainer.model.base import Base
from trainer.model.lora import fresh_adapter, target_modules
from trainer.model.lora_names import Scaling
from trainer.native import packed_weights
from trainer.native.compile import load_library
from trainer.native.packed_weights import (
    HIGH_RANK,
    LANES,
    WIDE,
    PackedBases,
    PackedWeights,
    in_turns,
    pack,
    panels,
)

ADAPTED: dict[str, str | tuple[str, ...]] = {
    "all": "all-linear",
    "some": ("k_proj", "up_proj"),
    "one layer": ("model.layers.1.self_attn.v_proj", "model.layers.1.mlp.gate_proj"),
}


def version(
    base: Base, targets: str | tuple[str, ...], *, seed: int = 1, rank: int = 4
) -> Trainable:
    fresh = fresh_adapter(base, target_modules(base, targets), rank=rank, seed=0)
    generator = torch.Generator().manual_seed(seed)
    noisy = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in fresh.items()}
    return trainable_view(base.tensors, noisy, scaling=Scaling(8.0))


def assert_same(found: PackedWeights, expected: PackedWeights) -> None:
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], atol=1e-5, rtol=1e-5, msg=name)
    for name in ("embedding", "norm", "head"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("targets", ADAPTED)
@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3])
def test_an_adapter_is_added_to_the_packed_base(
    config: Callable[[], PreTrainedConfig], targets: str
) -> None:
    base = base_of(config)
    shape, bases, view = decoder(base), PackedBases(), version(base, ADAPTED[targets])
    with torch.no_grad():
        expected = pack(shape, view)
        assert_same(bases.pack(shape, view), expected)
        plain = trainable_view(base.tensors, {}, scaling=Scaling(1.0))
        changed = {
            what
            for one, other in zip(pack(shape, plain).layers, expected.layers, strict=True)
            for what in FUSED
            if not torch.allclose(one[what], other[what])
        }
        assert_same(bases.pack(shape, plain), pack(shape, plain))
    assert changed == {"all": set(FUSED)}.get(targets, {"qkv", "gate_up"})


def test_weights_trained_in_full_are_packed_anew() -> None:
    base = base_of(QWEN3)
    full = {n: 2 * p.detach() for n, p in base.model.named_parameters()}
    view = trainable_view(base.tensors, full, scaling=Scaling(1.0))
    shape, bases = decoder(base), PackedBases()
    with torch.no_grad():
        bases.pack(shape, trainable_view(base.tensors, {}, scaling=Scaling(1.0)))
        assert_same(bases.pack(shape, view), pack(shape, view))


def test_without_a_compiler_an_adapted_version_is_packed_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_weights, "load_library", lambda _: None)
    base = base_of(QWEN3)
    view, shape = version(base, "all-linear"), decoder(base)
    with torch.no_grad():
        assert_same(PackedBases().pack(shape, view), pack(shape, view))


def test_an_adapter_of_a_high_rank_is_multiplied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> PackedWeights:
        raise AssertionError("adapt.c was asked")

    monkeypatch.setattr(PackedBases, "_add_adapters", refused)
    base = base_of(QWEN3)
    low, high = (version(base, "all-linear", rank=rank) for rank in (HIGH_RANK, HIGH_RANK + 1))
    shape, bases = decoder(base), PackedBases()
    with torch.no_grad():
        assert_same(bases.pack(shape, high), pack(shape, high))
        if load_library("adapt") is not None:
            with pytest.raises(AssertionError, match="was asked"):
                bases.pack(shape, low)


def test_the_room_of_a_version_that_is_gone_is_used_again() -> None:
    """The memory of a version that is still held is not reused."""
    if load_library("adapt") is None:
        missing("no C compiler (apt-get install gcc libc6-dev): versions are packed anew")
    base = base_of(QWEN3)
    shape, bases = decoder(base), PackedBases()
    views = [version(base, "all-linear", seed=seed) for seed in range(4)]
    with torch.no_grad():
        held = [bases.pack(shape, view) for view in views[:3]]
        place = held[1].layers[0]["qkv"].data_ptr()
        del held[1]
        gc.collect()
        held.append(bases.pack(shape, views[3]))
        assert held[2].layers[0]["qkv"].data_ptr() == place
        for one, view in zip(held, (views[0], views[2], views[3]), strict=True):
            assert_same(one, pack(shape, view))


def test_panels_and_turns_hold_each_element_in_its_place() -> None:
    """Twin of their meaning, element by element."""
    weight = torch.arange(3.0 * 40).view(3, 40)
    found = panels(weight)
    assert found.shape == (-(-40 // LANES), 3, LANES)
    of = [(o // LANES, i, o % LANES, weight[i, o]) for i in range(3) for o in range(40)]
    assert all(found[panel, i, lane] == value for panel, i, lane, value in of)
    assert not found[-1, :, 40 % LANES :].any()
    turns = [
        half + block + i for block in range(0, 32, WIDE) for half in (0, 32) for i in range(WIDE)
    ]
    assert in_turns(torch.arange(64)).tolist() == turns
