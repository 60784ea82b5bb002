"""The decoding step in C against the same step in torch, and that rows do not meet in it."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from tests.kit.postgres import missing
from tests.unit.trainer.test_sampler_model import QWEN2, QWEN3, _llama, base_of, decoder
from trainer.lora import fresh_adapter, target_modules
from trainer.native.library import library
from trainer.sampler import native
from trainer.sampler.lane import Lane, independent
from trainer.sampler.model import Fused, model_of
from trainer.weights import trainable

ROWS, CAPACITY = 13, 48


@pytest.fixture(autouse=True)
def compiler() -> None:
    if library("decode") is None:
        missing("no C compiler (apt-get install gcc libc6-dev): the sampler decodes through torch")


def _wide_heads(config: Callable[[], PreTrainedConfig]) -> Callable[[], PreTrainedConfig]:
    """Heads of 16, which `decode.c` takes; of 8 it does not."""

    def made() -> PreTrainedConfig:
        made = config()
        made.head_dim = 16
        return made

    return made


def fused(config: Callable[[], PreTrainedConfig]) -> Fused:
    base = base_of(_wide_heads(config))
    fresh = fresh_adapter(base, target_modules(base, "all-linear"), rank=4, seed=0)
    generator = torch.Generator().manual_seed(1)
    noisy = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in fresh.items()}
    view = trainable(base.tensors, noisy, alpha=8.0)
    made = model_of(decoder(base), view, num_bytes=base.num_bytes)
    assert isinstance(made, Fused)
    return made


def lane_of(model: Fused) -> Lane:
    """With something in the cache before each row's position."""
    lane = Lane(model, capacity=CAPACITY, size=ROWS, fixed=False)
    generator = torch.Generator().manual_seed(2)
    lane.keys.copy_(torch.randn(lane.keys.shape, generator=generator))
    lane.values.copy_(torch.randn(lane.keys.shape, generator=generator))
    return lane


TOKENS = torch.arange(ROWS) * 7 % 103
POSITIONS = torch.arange(ROWS) * 3 + 5


@pytest.mark.parametrize("config", [_llama, QWEN2, QWEN3])
def test_logits_and_cache_are_those_of_torch(config: Callable[[], PreTrainedConfig]) -> None:
    model = fused(config)
    assert model.native is not None
    ours, theirs = lane_of(model), lane_of(replace(model, native=None))
    found = ours.logits(TOKENS, POSITIONS)
    expected = theirs.logits(TOKENS, POSITIONS)
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_its_bits_in_any_company_and_on_any_number_of_threads(threads: int) -> None:
    model = fused(QWEN3)
    expected = lane_of(model).logits(TOKENS, POSITIONS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(lane_of(model).logits(TOKENS, POSITIONS), expected)
        assert torch.equal(lane_of(model).logits(TOKENS[:1], POSITIONS[:1]), expected[:1])
        assert independent(lane_of(model))
    finally:
        torch.set_num_threads(before)


def test_bits_that_must_not_depend_on_a_compiler_come_from_torch() -> None:
    model = fused(QWEN3)
    lanes = [
        Lane(each, capacity=CAPACITY, size=ROWS, fixed=True)
        for each in (model, replace(model, native=None))
    ]
    found, expected = (lane.logits(TOKENS, POSITIONS) for lane in lanes)
    assert torch.equal(found, expected)


def test_what_is_not_a_number_stays_so_and_in_its_row() -> None:
    model = fused(QWEN3)
    lane, clean = lane_of(model), lane_of(model)
    lane.keys[:, 4] = float("nan")
    found, expected = (x.logits(TOKENS, POSITIONS) for x in (lane, clean))
    assert found[4].isnan().all()
    assert torch.equal(found[5:], expected[5:])
    assert torch.equal(found[:4], expected[:4])


@pytest.mark.parametrize(
    ("rows", "threads", "expected"),
    [
        (32, 2, [(0, 16), (16, 32)]),
        (8, 2, [(0, 8)]),
        (13, 4, [(0, 8), (8, 13)]),
        (40, 2, [(0, 24), (24, 40)]),
        (1, 1, [(0, 1)]),
    ],
)
def test_threads_take_whole_blocks_of_rows(
    rows: int, threads: int, expected: list[tuple[int, int]]
) -> None:
    assert native._split(rows, threads) == expected


def test_without_a_compiler_torch_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda _: None)
    assert fused(QWEN3).native is None


def test_a_compiler_that_fails_is_told_and_torch_decodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    try:
        assert library("decode") is None
    finally:
        library.cache_clear()
    assert "decode runs through torch" in caplog.text
    assert not list((tmp_path / "headrace").iterdir())


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    assert library("decode") is not None
    (made,) = (tmp_path / "headrace").iterdir()
    library.cache_clear()

    def refused(*_: object, **__: object) -> None:
        raise subprocess.SubprocessError("compiled again")

    monkeypatch.setattr(subprocess, "run", refused)
    try:
        assert library("decode") is not None, made
    finally:
        library.cache_clear()


def test_sizes_that_are_no_whole_vectors_are_left_to_torch() -> None:
    model = fused(QWEN3)
    odd = replace(model.decoder, head_dim=24)
    parts = {"embedding": model.embedding, "norm": model.norm, "head": model.head}
    assert native.native_of(odd, model.layers, **parts) is None
