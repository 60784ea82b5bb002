"""Picks tokens from a large vocabulary without the exact running sum of their masses.

A running sum of 50,000 masses takes longer than everything else that a draw needs. Which token it picks
is known from any sum that is accurate enough, unless the share is next to the border of two tokens. Such
a share is left to the exact sum, so every token is the one that the exact sum picks.

Legend: R rows, V vocabulary.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from trainer.native.compile import load_library
from trainer.native.threads import run_on_threads

MANY_LOGPROBS = 1 << 18
"""With fewer of them, calling the function costs as much as the exact sum."""
MOST_VOCABULARY = 1 << 20
NEAR = 1e-9
"""The share of all mass by which the exact sum of MOST_VOCABULARY masses in double precision, and the
sum in C, cannot be wrong. The first is wrong by less than 2e-10, and the second by less than 1e-11."""
PHASE = 8
"""The integers of a Phase (`phases.h`)."""


class _Pick(ctypes.Structure):
    """`Pick` of `pick.c`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary")),
        *((name, ctypes.c_void_p) for name in ("logprobs", "uniform", "token")),
        ("near", ctypes.c_double),
        ("phase", ctypes.c_int64 * PHASE),
    )


def pick(logprobs_R_V: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor | None:
    """The first token of each row whose cumulative mass exceeds that share of all mass, (R). None where
    this is not known: for few logprobs, without a compiler, or if a share is near to a border."""
    num_rows, vocabulary = logprobs_R_V.shape
    is_plain = all(
        t.dtype == torch.float64 and t.device.type == "cpu" and t.is_contiguous()
        for t in (logprobs_R_V, uniform_R)
    )
    if logprobs_R_V.numel() < MANY_LOGPROBS or vocabulary > MOST_VOCABULARY or not is_plain:
        return None
    run = _c_function()
    if run is None:
        return None
    token_R = torch.empty(num_rows, dtype=torch.int64)
    given = _Pick(
        rows=num_rows,
        vocabulary=vocabulary,
        logprobs=logprobs_R_V.data_ptr(),
        uniform=uniform_R.data_ptr(),
        token=token_R.data_ptr(),
        near=NEAR,
    )
    run_on_threads(lambda _: run(given), torch.get_num_threads())
    return None if bool((token_R < 0).any()) else token_R


@cache
def _c_function() -> Callable[..., Any] | None:
    library = load_library("pick")
    if library is None:
        return None
    library.pick.argtypes = (ctypes.POINTER(_Pick),)
    library.pick.restype = None
    run: Callable[..., Any] = library.pick
    return run
