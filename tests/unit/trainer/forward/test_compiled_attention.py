"""Attention by `flex_attention`: the same as one segment after the other, gradients included."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from trainer.forward.compiled_attention import (
    BLOCK,
    CompiledAttention,
    block_mask_of,
    padded_length,
)
from trainer.forward.ops import Forward
from trainer.forward.spans import Segment, Spans, spans_of
from trainer.forward.varlen_attention import varlen_attend

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def rows(*lengths: int) -> tuple[Segment, ...]:
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    return tuple(Segment(start, end) for start, end in pairwise(ends))


SHARED = (
    Segment(0, 150),
    Segment(150, 170, (range(150),)),
    Segment(170, 460, (range(150),)),
    Segment(460, 461),
)
TREE = (
    *SHARED[:3],
    Segment(460, 600, (range(170, 300),)),
    Segment(600, 750, (range(150), range(170, 300), range(460, 600))),
    Segment(750, 751, (range(150), range(600, 750))),
)
CASES = {
    "one token": rows(1),
    "a part of a block": rows(50),
    "whole blocks": rows(256, 128),
    "several in one block": rows(3, 60, 1, 20),
    "across blocks": rows(100, 200, 7, 300),
    "a shared prompt": SHARED,
    "a tree": TREE,
}


def states(
    spans: Spans, *, device: torch.device, heads: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Queries, keys and values of packed tokens, which require gradients."""
    generator = torch.Generator().manual_seed(0)
    num = spans.segments[-1].end
    made = [torch.randn(num, n, 16, generator=generator) for n in (heads, 2, 2)]
    return [x.to(device, dtype).requires_grad_() for x in made]


def attended(
    spans: Spans, inputs: list[torch.Tensor], *, compiled: bool = False
) -> list[torch.Tensor]:
    """The output and the gradients of its inputs."""
    for x in inputs:
        x.grad = None
    out = varlen_attend(spans, compiled=compiled)(0, *inputs)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator).to(out))
    return [out.detach(), *(x.grad.clone() for x in inputs if x.grad is not None)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize(
    ("case", "window"),
    [
        *((case, None) for case in CASES),
        *(
            (case, window)
            for case in ("across blocks", "a shared prompt")
            for window in (1, 40, 128)
        ),
    ],
)
def test_it_computes_what_one_segment_after_the_other_does(
    case: str, heads: int, window: int | None
) -> None:
    """A CPU has no gradients of it."""
    spans = spans_of(CASES[case], device=CPU)
    with torch.no_grad():
        q, k, v = states(spans, device=CPU, heads=heads, dtype=torch.float64)
        expected = varlen_attend(spans, windows=(window,))(0, q, k, v)
        if spans.key_U is not None:
            k, v = k[spans.key_U], v[spans.key_U]
        out = CompiledAttention(spans, backend=None, window=window)(q, k, v).flatten(1)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_the_blocks_hold_exactly_the_keys_that_are_seen(case: str) -> None:
    mask = block_mask_of(spans_of(CASES[case], device=CPU), device=CPU)
    num_queries, num_keys = mask.seq_lengths
    query, key = torch.arange(num_queries)[:, None], torch.arange(num_keys)[None]
    nothing = torch.zeros(0)
    seen = mask.mask_mod(nothing, nothing, query, key)
    of_blocks = seen.view(num_queries // BLOCK, BLOCK, -1, BLOCK).permute(0, 2, 1, 3).flatten(2)
    assert torch.equal(mask.to_dense()[0, 0].bool(), of_blocks.any(-1))
    whole = mask.full_kv_num_blocks
    assert whole is not None
    assert whole[0, 0].tolist() == of_blocks.all(-1).sum(-1).tolist()


def test_a_block_of_keys_that_no_query_sees_is_left_out() -> None:
    """Four rows of two blocks: of 8 x 8 blocks, the second of each row sees the first one whole."""
    mask = block_mask_of(spans_of(rows(*[2 * BLOCK] * 4), device=CPU), device=CPU)
    assert mask.kv_num_blocks.tolist() == [[[1] * 8]]
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1] * 4]]
    assert mask.kv_indices[0, 0, :, 0].tolist() == list(range(8))


def test_only_a_compiled_policy_of_the_current_rules_has_it() -> None:
    from tests.unit.trainer.forward.test_ops import tiny
    from tests.unit.trainer.support import job
    from trainer.policy import forward_of

    loaded, advanced = tiny().loaded, job(compile=True).config.advanced
    assert forward_of(loaded, advanced).fuses_attention
    assert not forward_of(loaded, advanced, rules=4).fuses_attention
    assert not forward_of(loaded, job().config.advanced).fuses_attention
    assert not Forward().fuses_attention


@pytest.fixture
def deterministic() -> Iterator[None]:
    """As on the device's thread. Otherwise the gradient of a shared prompt has no equal bits."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


def test_a_length_is_one_of_few_and_at_most_half_too_long() -> None:
    lengths = {padded_length(num) for num in range(1, 20_000)}
    assert lengths == {
        256,
        384,
        512,
        768,
        1024,
        1536,
        2048,
        3072,
        4096,
        6144,
        8192,
        12288,
        16384,
        24576,
    }
    assert all(num <= padded_length(num) <= 1.5 * num for num in range(171, 20_000))


def compiled(count: list[tuple[int, ...]]) -> Callable[..., Any]:
    """A backend that notes the shapes for which it is asked."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        shapes = [tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)]
        assert all(isinstance(size, int) for shape in shapes for size in shape), "static"
        count.append(shapes[0])
        return graph.forward

    return backend


def test_each_length_is_compiled_once_for_exactly_itself() -> None:
    """Traced on a CPU. Sizes that were dynamic, or tied to each other because they happened to be
    equal, would let the bits of a pass depend on those before it."""
    torch._dynamo.reset()
    counted: list[tuple[int, ...]] = []
    backend = compiled(counted)
    with torch.no_grad():
        for lengths in ((300,), (128,), (1,), (64, 700), (1000, 24), (300, 10), (2000,), (300,)):
            spans = spans_of(rows(*lengths), device=CPU)
            q, k, v = states(spans, device=CPU, heads=6, dtype=torch.float32)
            CompiledAttention(spans, backend=backend)(q, k, v)
    torch._dynamo.reset()
    assert sorted(shape[2] for shape in counted) == [256, 384, 768, 1024, 2048]


@needs_gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("heads", [2, 6])
def test_the_kernel_has_equal_bits_for_any_shapes_before_it(heads: int) -> None:
    shapes = [spans_of(segments, device=CUDA) for segments in CASES.values()]
    inputs = [states(s, device=CUDA, heads=heads, dtype=torch.bfloat16) for s in shapes]
    found = []
    for order in (range(len(shapes)), reversed(range(len(shapes)))):
        torch._dynamo.reset()
        results = {}
        for n in order:
            results[n] = attended(shapes[n], inputs[n], compiled=True)
            again = attended(shapes[n], inputs[n], compiled=True)
            assert all(torch.equal(a, b) for a, b in zip(results[n], again, strict=True))
        found.append(results)
    for n in range(len(shapes)):
        assert all(torch.equal(a, b) for a, b in zip(found[0][n], found[1][n], strict=True))
        exact = attended(shapes[n], [x.detach().float().requires_grad_() for x in inputs[n]])
        for one, other in zip(found[0][n], exact, strict=True):
            torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.05)
