"""A model that is built from a seed has the same weights whatever else the process does."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from tests.unit.trainer.support import TINY
from trainer.model.base import Base, build_base


def built() -> Base:
    return build_base(TINY, {}, device=torch.device("cpu"))


def test_two_threads_build_the_same_model_from_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet after the seed is set, if both can be there."""
    expected, both, seed = built(), threading.Barrier(2, timeout=0.2), torch.manual_seed

    def seed_together(number: int) -> torch.Generator:
        generator = seed(number)
        with suppress(threading.BrokenBarrierError):
            both.wait()
        return generator

    monkeypatch.setattr(torch, "manual_seed", seed_together)
    with ThreadPoolExecutor(2) as pool:
        made = [future.result() for future in [pool.submit(built) for _ in range(2)]]
    for base in made:
        assert all(torch.equal(base.tensors[n], t) for n, t in expected.tensors.items())
