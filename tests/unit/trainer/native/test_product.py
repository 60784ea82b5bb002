"""Products in C against torch's: the same bits, and by torch wherever the bits could differ."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tests.kit.postgres import missing
from trainer.device_thread import limit_threads
from trainer.native import product as products
from trainer.native.product import (
    MOST_THREADS,
    Order,
    Products,
    c_function,
    in_c,
    known_order,
    through_torch,
)

ROWS = (8, 14, 15, 32, 48, 85)
SIZES = ((576, 960), (1000, 700), (2048, 300))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """As on a machine with two cores."""
    with limit_threads(MOST_THREADS):
        yield


def order(block: int) -> Order:
    """The C function with this block, whether or not the order of torch's library is known here."""
    run = c_function()
    if run is None:
        missing("no C compiler (apt-get install gcc libc6-dev): these products are torch's")
    assert run is not None
    return Order(run, block)


def drawn(
    rows: int, inputs: int, outputs: int, *, across: bool, added: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x, a weight that lies in the order of its inputs (`across`) or outputs, and what is added."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(inputs, outputs, generator=generator)
    add = None if added is None else torch.randn((rows, outputs)[-added:], generator=generator)
    return x, weight if across else weight.t().contiguous().t(), add


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("added", [None, 1, 2])
@pytest.mark.parametrize("across", [True, False])
def test_products_of_whole_numbers_are_exact(
    *, across: bool, added: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every processor: no sum of these is rounded, so it does not depend on the order."""
    given = order(192)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for inputs, outputs in (*SIZES, (1, 1), (33, 31), (193, 65)):
        for rows in (1, 7, *ROWS):
            x, weight, add = (
                None if part is None else part.mul(4).round()
                for part in drawn(rows, inputs, outputs, across=across, added=added)
            )
            assert x is not None
            assert weight is not None
            assert torch.equal(in_c(given, x, weight, add), through_torch(x, weight, add))


@pytest.mark.parametrize("added", [None, 1, 2])
@pytest.mark.parametrize("across", [True, False])
def test_products_have_the_bits_of_torch(*, across: bool, added: int | None) -> None:
    """The first two by torch, the third in C if the order of torch's library is known here."""
    for inputs, outputs in SIZES:
        for rows in ROWS:
            kept = Products()
            x, weight, add = drawn(rows, inputs, outputs, across=across, added=added)
            expected = through_torch(x, weight, add)
            assert all(torch.equal(kept.compute(x, weight, add), expected) for _ in range(3))
            if known_order() is not None:
                assert list(kept.are_equal.values()) == [True]


def test_logits_have_the_bits_of_a_linear_layer() -> None:
    x, weight, _ = drawn(48, 576, 960, across=False, added=None)
    kept = Products()
    expected = F.linear(x, weight.t().contiguous())
    assert all(torch.equal(kept.compute(x, weight, None), expected) for _ in range(3))


def test_a_shape_whose_bits_differ_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: with another order the bits differ, and only the trial notices."""
    other = order(64)
    x, weight, _ = drawn(48, 576, 960, across=True, added=None)
    expected = through_torch(x, weight, None)
    assert not torch.equal(in_c(other, x, weight, None), expected)
    monkeypatch.setattr(products, "known_order", lambda: other)
    kept = Products()
    assert all(torch.equal(kept.compute(x, weight, None), expected) for _ in range(4))
    assert list(kept.are_equal.values()) == [False]


def test_without_a_known_order_every_product_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "known_order", lambda: None)
    x, weight, _ = drawn(48, 576, 960, across=True, added=None)
    kept = Products()
    assert all(kept.compute(x, weight, None).equal(x @ weight) for _ in range(3))
    assert not kept.are_equal


def test_other_products_are_never_tried() -> None:
    """Few or many rows, small weights, other types, gradients, and layouts that C does not read."""
    x, weight, add = drawn(48, 576, 960, across=True, added=2)
    assert add is not None
    kept = Products()
    for one, by, plus in (
        (x[:7], weight, None),
        (x.repeat(6, 1), weight, None),
        (x, weight[:, :900], None),
        (x.double(), weight.double(), None),
        (x.clone().requires_grad_(), weight, None),
        (x.t().contiguous().t(), weight, None),
        (x, torch.randn(576, 1920)[:, ::2], None),
        (x, weight, add.t().contiguous().t()),
    ):
        expected = through_torch(one, by, plus)
        assert all(torch.equal(kept.compute(one, by, plus), expected) for _ in range(3))
    assert not kept.seen


def test_many_threads_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: MOST_THREADS + 1)
    x, weight, _ = drawn(48, 576, 960, across=True, added=None)
    kept = Products()
    assert all(kept.compute(x, weight, None).equal(x @ weight) for _ in range(3))
    assert not kept.seen


def test_a_product_keeps_its_gradient() -> None:
    x, weight, _ = drawn(48, 576, 960, across=True, added=None)
    x.requires_grad_()
    for _ in range(3):
        products.product(x, weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 3 * weight.sum(1).expand_as(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("added", [None, 1, 2])
def test_some_rows_have_the_bits_of_the_whole_product(*, across: bool, added: int | None) -> None:
    """Wherever they are in it, for a large weight and a small one. Of more rows than a product has,
    each is in one of several."""
    for inputs, outputs in ((576, 960), (576, 576)):
        whole, weight, add = drawn(256, inputs, outputs, across=across, added=added)
        expected = through_torch(whole, weight, add)
        kept = Products()
        for here in (slice(0, 40), slice(200, 248), slice(7, 8), slice(0, 256), slice(96, 256)):
            plus = add[here] if add is not None and add.dim() == 2 else add
            found = kept.compute(whole[here], weight, plus, rows=256)
            assert torch.equal(found, expected[here])
        twice = None if add is None else add if add.dim() == 1 else torch.cat([add, add[:9]])
        found = kept.compute(torch.cat([whole, whole[:9]]), weight, twice, rows=256)
        assert torch.equal(found, torch.cat([expected, expected[:9]]))
        if known_order() is not None:
            assert list(kept.are_equal.values()) == [True]


def test_some_rows_in_another_order_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    other = order(64)
    whole, weight, _ = drawn(256, 576, 960, across=True, added=None)
    expected = through_torch(whole, weight, None)
    monkeypatch.setattr(products, "known_order", lambda: other)
    kept = Products()
    for _ in range(4):
        assert torch.equal(kept.compute(whole[30:70], weight, None, rows=256), expected[30:70])
    assert list(kept.are_equal.values()) == [False]
