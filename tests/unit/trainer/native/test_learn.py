"""The learner's pass in C against the plain one, in float64: values, and gradients of every
adapter."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedConfig

from tests.kit.postgres import missing
from tests.unit.trainer.forward.test_packing import example, packed
from tests.unit.trainer.sampler.test_decode_model import (
    QWEN2,
    QWEN3,
    _llama,
    base_of,
    decoder,
    views,
)
from trainer.forward.decoder import Decoder
from trainer.forward.packing import MicroBatch, packed_attend
from trainer.forward.weights import Trainable, layer_module
from trainer.model.base import Base
from trainer.native.compile import load_library
from trainer.native.learn import learner_pass
from trainer.native.supported_models import MOST_HIDDEN


@pytest.fixture(autouse=True)
def compiler() -> None:
    if load_library("learn") is None:
        missing("no C compiler (apt-get install gcc libc6-dev): the learner's pass is torch's")


def micro() -> MicroBatch:
    """Groups that share contexts shorter and longer than a tile, rows that share nothing, lengths
    around those of vectors, blocks and tiles, and a sample of three rows that leave one another."""

    def tokens(start: int, size: int) -> tuple[int, ...]:
        return tuple((7 * start + 5 * n) % 103 for n in range(size))

    groups = [(3, (1, 2, 40)), (70, (16, 33, 5)), (1, (90,)), (17, (31, 32)), (9, (8,))]
    (made,) = packed(
        [
            example(sample, tokens(number, context), tokens(sample + 50, size))
            for number, (context, sizes) in enumerate(groups)
            for sample, size in enumerate(sizes)
        ]
        + [
            example(99, tokens(90, 20) + tokens(91, 18 * turn), tokens(turn, 30))
            for turn in range(3)
        ]
    )
    assert max(len(segment.context) for segment in made.segments) > 1
    return made


def found(shape: Decoder, view: Trainable, batch: MicroBatch) -> torch.Tensor:
    native = learner_pass(shape, view, takes_wide=True)
    assert native is not None
    return native.hidden_states(batch.tokens_N, batch.positions_N, batch.segments)


def expected(shape: Decoder, view: Trainable, batch: MicroBatch) -> torch.Tensor:
    attend = packed_attend(batch, kv_heads=shape.kv_heads)
    return shape.hidden_states(view, batch.tokens_N, batch.positions_N, attend)


def leaves(view: Trainable) -> list[torch.Tensor]:
    return [tensor.requires_grad_() for pair in view.pairs.values() for tensor in pair]


def gradients(hidden: torch.Tensor, trained: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3)).double()
    return list(torch.autograd.grad((hidden * weights.to(hidden.dtype)).sum(), trained))


@pytest.mark.parametrize("config", [_llama, QWEN2, QWEN3])
@pytest.mark.parametrize("adapted", ["nothing", "all-linear", "some"])
def test_values_and_gradients_are_those_of_the_plain_pass(
    config: Callable[[], PreTrainedConfig], adapted: str
) -> None:
    base = base_of(config)
    view, shape, batch = views(base)[adapted], decoder(base), micro()
    trained = leaves(view)
    mine, theirs = found(shape, view, batch), expected(shape, view, batch)
    torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)
    assert mine.requires_grad == bool(trained)
    if not trained:
        return
    for own, other in zip(gradients(mine, trained), gradients(theirs, trained), strict=True):
        torch.testing.assert_close(own, other, atol=1e-9, rtol=1e-9)


def large() -> PreTrainedConfig:
    made = QWEN3()
    made.hidden_size = MOST_HIDDEN + 16
    return made


def test_a_wide_base_has_the_gradients_of_the_plain_pass_too() -> None:
    base = base_of(large)
    view, shape, batch = views(base)["all-linear"], decoder(base), micro()
    trained = leaves(view)
    mine, theirs = found(shape, view, batch), expected(shape, view, batch)
    torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)
    for own, other in zip(gradients(mine, trained), gradients(theirs, trained), strict=True):
        torch.testing.assert_close(own, other, atol=1e-9, rtol=1e-9)
    assert learner_pass(shape, view) is None, "under the rules before it ran through torch"


@pytest.mark.parametrize("bare", [0, 1])
def test_layers_with_other_adapters_do_not_share_their_place(bare: int) -> None:
    """Layers use the same memory one after the other, and one of these has no adapters."""
    base = base_of(QWEN3)
    whole, shape, batch = views(base)["all-linear"], decoder(base), micro()
    name = layer_module(bare, "")
    pairs = {module: pair for module, pair in whole.pairs.items() if not module.startswith(name)}
    assert 0 < len(pairs) < len(whole.pairs)
    view = replace(whole, pairs=pairs)
    trained = leaves(view)
    mine, theirs = found(shape, view, batch), expected(shape, view, batch)
    torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)
    for own, other in zip(gradients(mine, trained), gradients(theirs, trained), strict=True):
        torch.testing.assert_close(own, other, atol=1e-9, rtol=1e-9)


def test_a_group_in_parts_has_the_gradients_of_the_whole() -> None:
    """The prompt is repeated where a group does not fit into a micro-batch."""
    base = base_of(QWEN3)
    view, shape = views(base)["all-linear"], decoder(base)
    trained = leaves(view)
    rows = [example(i, tuple(range(9)), tuple(range(20 + i, 40 + 4 * i))) for i in range(4)]

    def loss_of(batches: list[MicroBatch]) -> torch.Tensor:
        hidden = [found(shape, view, b).index_select(0, b.predictor_M) for b in batches]
        weights = torch.randn(sum(map(len, hidden)), generator=torch.Generator().manual_seed(3))
        return (torch.cat(hidden) * weights.double()[:, None]).sum()

    whole, parts = packed(rows), packed(rows, tokens=70)
    assert (len(whole), len(parts)) == (1, 2)
    one, other = loss_of(whole), loss_of(parts)
    torch.testing.assert_close(one, other, atol=1e-9, rtol=0)
    for own, theirs in zip(
        torch.autograd.grad(one, trained), torch.autograd.grad(other, trained), strict=True
    ):
        torch.testing.assert_close(own, theirs, atol=1e-9, rtol=1e-9)


def single(base: Base) -> Trainable:
    """In float32, with heads whose width is a whole number of vectors there too."""
    view = views(base)["all-linear"]
    pairs = {m: (a.detach().float(), b.detach().float()) for m, (a, b) in view.pairs.items()}
    return replace(view, base=dict(base.tensors), pairs=pairs, dtype=torch.float32)


def wide() -> PreTrainedConfig:
    made = QWEN3()
    made.head_dim = 16
    return made


def test_in_float32_it_rounds_as_the_plain_pass_does() -> None:
    base = base_of(wide)
    view, shape, batch = single(base), decoder(base), micro()
    trained = leaves(view)
    mine, theirs = found(shape, view, batch), expected(shape, view, batch)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    for own, other in zip(gradients(mine, trained), gradients(theirs, trained), strict=True):
        assert (own - other).norm() <= 1e-4 * other.norm()


def test_the_number_of_threads_changes_no_bit() -> None:
    base = base_of(wide)
    view, shape, batch = single(base), decoder(base), micro()
    trained = leaves(view)
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            hidden = found(shape, view, batch)
            torch.set_num_threads(1)
            seen.append((hidden.detach().clone(), *gradients(hidden, trained)))
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def test_another_pass_between_leaves_what_a_pass_kept() -> None:
    base = base_of(QWEN3)
    view, shape, batch = views(base)["all-linear"], decoder(base), micro()
    trained = leaves(view)
    alone = gradients(found(shape, view, batch), trained)
    hidden = found(shape, view, batch)
    with torch.no_grad():
        reference = found(shape, views(base)["nothing"], batch)
    other = found(shape, view, batch)
    assert all(torch.equal(a, b) for a, b in zip(gradients(hidden, trained), alone, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients(other, trained), alone, strict=True))
    assert torch.equal(reference, found(shape, views(base)["nothing"], batch))


def test_a_pass_goes_back_once() -> None:
    base = base_of(QWEN3)
    view, shape = views(base)["all-linear"], decoder(base)
    trained = leaves(view)
    hidden = found(shape, view, micro())
    torch.autograd.grad(hidden.sum(), trained, retain_graph=True)
    with pytest.raises(RuntimeError, match="goes back once"):
        torch.autograd.grad(hidden.sum(), trained)


def test_the_tensors_of_a_version_are_left_as_they_are() -> None:
    base = base_of(QWEN3)
    view, shape = views(base)["all-linear"], decoder(base)
    trained = leaves(view)
    before = [t.clone() for t in (*view.base.values(), *(x.detach() for x in trained))]
    gradients(found(shape, view, micro()), trained)
    after = [*view.base.values(), *trained]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_full_wide_odd_or_coarse_training_is_left_to_torch() -> None:
    base = base_of(QWEN3)
    view, shape = views(base)["all-linear"], decoder(base)
    assert learner_pass(shape, view) is not None
    assert learner_pass(shape, views(base)["full"]) is None, "its weights need gradients"
    assert learner_pass(shape, replace(view, dtype=torch.bfloat16)) is None
    assert learner_pass(replace(shape, head_dim=12), view) is None
    single_masters = {m: (a.float(), b.float()) for m, (a, b) in view.pairs.items()}
    assert learner_pass(shape, replace(view, pairs=single_masters)) is None
    embedding = {"model.embed_tokens.weight": torch.zeros(2, 1024).double()}
    assert learner_pass(shape, replace(view, base={**view.base, **embedding})) is None
    assert learner_pass(shape, replace(view, base={**view.base, **embedding}), takes_wide=True)
