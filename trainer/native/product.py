"""Products of a few rows with a large weight, with the bits of torch and in less time.

A product of 8 to 256 rows is short for the weight that it reads, and torch's library waits for memory:
with 16 to 48 rows it reaches a third to two thirds of its speed. `product.c` asks for the next part of
the weight while it computes with this one. It computes each number as that library does: it sums
`block` products one after the other, adds the sum to the number, and goes on with the next ones.

Whether that holds, and for which `block`, depends on the processor and on the library, so it is tried:
`block` once per process, and each shape with its own numbers. A shape is computed by torch the first
time. The second time both compute it, and only if all bits are equal is it computed in C from then on.
So a compiler changes no bit, and runs with `advanced.deterministic` use these products too.

A pass of fixed shape is filled up with rows that nobody needs. Because C computes each row by itself, it
leaves them out, and the other rows have the bits of the whole pass (`rows` of `product`).

Legend: R rows, I inputs, O outputs.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from trainer.native.compile import load_library
from trainer.native.threads import run_on_threads

FEWEST_ROWS, MOST_ROWS = 8, 256
"""With fewer rows the library has another order, and with more rows it does not wait for memory."""
MOST_THREADS = 2
"""It was measured on two cores. With many threads, starting them may cost more than is gained."""
LARGE_WEIGHT = 1 << 19
"""A weight of this many numbers (2 MiB) is not kept by the cache next to the processor."""
BLOCKS = (192, 256, 320, 384, 448, 512)
"""The numbers of products that are tried as `block`: multiples of two vectors, at most MOST_BLOCK."""
TRIAL = (16, 1700, 520)
"""Rows, inputs and outputs of the trial. The inputs are not a multiple of any block."""
PHASE = 8
"""The integers of a Phase (`phases.h`)."""

Shape = tuple[object, ...]


class _Product(ctypes.Structure):
    """`Product` of `product.c`."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("rows", "inputs", "outputs", "block", "across", "threads")],
        *[(name, ctypes.c_void_p) for name in ("x", "w", "add", "out")],
        *[(f"{name}_stride", ctypes.c_int64) for name in ("x", "w", "add", "out")],
        ("phase", ctypes.c_int64 * PHASE),
    )


@dataclass(slots=True, eq=False)
class Products:
    """Which shapes this process has seen, and whether the bits of each were equal."""

    seen: set[Shape] = field(default_factory=set)
    are_equal: dict[Shape, bool] = field(default_factory=dict)

    def compute(
        self,
        x_R_I: torch.Tensor,
        weight_I_O: torch.Tensor,
        add: torch.Tensor | None,
        *,
        rows: int | None = None,
    ) -> torch.Tensor:
        """The product, by torch or in C. C computes each row by itself, so it computes only the rows
        that there are. Torch computes `rows` rows, and the trial compares all of them."""
        rows = rows or len(x_R_I)
        if not _may_run_in_c(x_R_I, weight_I_O, add, rows):
            return _through_torch_in_parts(x_R_I, weight_I_O, add, rows)[: len(x_R_I)]
        added = None if add is None else add.dim()
        across = weight_I_O.stride(1) == 1
        shape = (rows, *weight_I_O.shape, across, added, torch.get_num_threads())
        if shape not in self.seen:
            self.seen.add(shape)
            return _through_torch_in_parts(x_R_I, weight_I_O, add, rows)[: len(x_R_I)]
        if self.are_equal.get(shape) is False or (found := known_order()) is None:
            return _through_torch_in_parts(x_R_I, weight_I_O, add, rows)[: len(x_R_I)]
        computed = in_c(found, x_R_I, weight_I_O, add)
        if shape in self.are_equal:
            return computed
        expected = _through_torch_in_parts(x_R_I, weight_I_O, add, rows)
        self.are_equal[shape] = torch.equal(_fill_up(computed, len(expected)), expected)
        return expected[: len(x_R_I)]


_products = Products()


def product(
    x_R_I: torch.Tensor,
    weight_I_O: torch.Tensor,
    add: torch.Tensor | None = None,
    *,
    rows: int | None = None,
) -> torch.Tensor:
    """x times the weight (R, O), plus `add` (R, O) or (O) if it is given, with the bits of torch. With
    `rows`, the bits are those of a product of that many rows, wherever in it each row is."""
    return _products.compute(x_R_I, weight_I_O, add, rows=rows)


def through_torch(
    x_R_I: torch.Tensor, weight_I_O: torch.Tensor, add: torch.Tensor | None
) -> torch.Tensor:
    """The same product by torch."""
    return x_R_I @ weight_I_O if add is None else torch.addmm(add, x_R_I, weight_I_O)


def _through_torch_in_parts(
    x_R_I: torch.Tensor, weight_I_O: torch.Tensor, add: torch.Tensor | None, rows: int
) -> torch.Tensor:
    """The same product by torch, in products of `rows` rows. The last one is filled up with rows of x,
    and so is the result."""
    num = -(-len(x_R_I) // rows) * rows
    if num == rows == len(x_R_I):
        return through_torch(x_R_I, weight_I_O, add)
    parts = _fill_up(x_R_I, num).split(rows)
    adds = (add,) * len(parts)
    if add is not None and add.dim() == 2:
        adds = _fill_up(add, num).split(rows)
    found = [through_torch(x, weight_I_O, plus) for x, plus in zip(parts, adds, strict=True)]
    return torch.cat(found)


def _fill_up(x_R: torch.Tensor, num: int) -> torch.Tensor:
    """The rows of x, again and again, until there are `num` of them."""
    return x_R[torch.arange(num) % len(x_R)] if num > len(x_R) else x_R


@dataclass(frozen=True, slots=True)
class Order:
    """The C function, and how many products it sums before it adds their sum to a number."""

    run: Callable[..., Any]
    block: int


@cache
def c_function() -> Callable[..., Any] | None:
    """`product` of `product.c`, or None where it cannot be compiled."""
    library = load_library("product")
    if library is None:
        return None
    library.product.argtypes = (ctypes.POINTER(_Product),)
    library.product.restype = None
    run: Callable[..., Any] = library.product
    return run


@cache
def known_order() -> Order | None:
    """The order in which torch's library sums a product here. None if it is none that is known, or if
    there is no compiler."""
    run = c_function()
    if run is None:
        return None
    rows, inputs, outputs = TRIAL
    generator = torch.Generator().manual_seed(0)
    x_R_I = torch.randn(rows, inputs, generator=generator)
    weight_I_O = torch.randn(inputs, outputs, generator=generator)
    expected = through_torch(x_R_I, weight_I_O, None)
    for block in BLOCKS:
        order = Order(run, block)
        if torch.equal(in_c(order, x_R_I, weight_I_O, None), expected):
            return order
    return None


def in_c(
    order: Order, x_R_I: torch.Tensor, weight_I_O: torch.Tensor, add: torch.Tensor | None
) -> torch.Tensor:
    """The same product in C. Its arguments must be those that `product` gives to C."""
    out_R_O = x_R_I.new_empty(len(x_R_I), weight_I_O.shape[1])
    across, threads = weight_I_O.stride(1) == 1, torch.get_num_threads()
    given = _Product(
        rows=len(x_R_I),
        inputs=len(weight_I_O),
        outputs=weight_I_O.shape[1],
        block=order.block,
        across=across,
        threads=threads,
        x=x_R_I.data_ptr(),
        w=weight_I_O.data_ptr(),
        add=None if add is None else add.data_ptr(),
        out=out_R_O.data_ptr(),
        x_stride=x_R_I.stride(0),
        w_stride=weight_I_O.stride(0 if across else 1),
        add_stride=add.stride(0) if add is not None and add.dim() == 2 else 0,
        out_stride=out_R_O.stride(0),
    )
    run_on_threads(lambda _: order.run(given), threads)
    return out_R_O


def _may_run_in_c(
    x_R_I: torch.Tensor, weight_I_O: torch.Tensor, add: torch.Tensor | None, rows: int
) -> bool:
    """Whether these are a few rows and a large weight in float32 on a CPU with few threads, without
    gradients, in a layout that C reads. The weight may be small where torch would compute more rows."""
    tensors = (x_R_I, weight_I_O, *(() if add is None else (add,)))
    return (
        all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        and FEWEST_ROWS <= rows <= MOST_ROWS
        and (weight_I_O.numel() >= LARGE_WEIGHT or len(x_R_I) % rows > 0)
        and torch.get_num_threads() <= MOST_THREADS
        and x_R_I.stride(1) == 1
        and 1 in weight_I_O.stride()
        and (add is None or add.stride(-1) == 1)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )
