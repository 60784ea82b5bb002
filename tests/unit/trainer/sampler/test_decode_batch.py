"""Decode batches of the sampler: their shapes, their threads, and the check before they are
trusted."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.trainer.support import TINY, request
from trainer.forward.decoder import decoder_of
from trainer.forward.transformers_pass import Fallback
from trainer.forward.weights import trainable_view
from trainer.model.base import build_base
from trainer.model.chat_template import Chat
from trainer.model.lora_names import Scaling
from trainer.policy import LoadedModel
from trainer.sampler import decode_model
from trainer.sampler.batcher import Batcher
from trainer.sampler.completion import Completion, Version
from trainer.sampler.counter_rng import CounterRng
from trainer.sampler.decode_batch import DecodeBatch, capacity_for, has_independent_rows, row_bytes
from trainer.sampler.decode_model import decode_model_of
from trainer.sampler.prefill import TorchPrompt


@pytest.mark.parametrize(("fixed", "seen"), [(True, 64), (False, 48)])
def test_a_lane_of_free_shape_looks_no_further_than_its_longest_row(fixed: bool, seen: int) -> None:
    batcher, row = Batcher(), _row()
    model = batcher._model(row.version)
    batch = DecodeBatch(model, capacity=64, size=8, fixed=fixed)
    assert batch._num_places() == 64, "an empty batch is asked by the check of its shapes"
    for prompt in ((1, 2, 3), tuple(range(33))):
        zeros = torch.zeros(2, 1, len(prompt), 16)
        batch.add(replace(row, prompt_ids=prompt), TorchPrompt(torch.zeros(8), zeros, zeros))
    assert batch._num_places() == seen


@pytest.mark.parametrize(("narrow", "expected"), [(32, 1), (31, 2)])
def test_narrow_models_decode_with_one_thread(
    monkeypatch: pytest.MonkeyPatch, narrow: int, expected: int
) -> None:
    """And give the other threads back to the learner."""
    seen: list[int] = []

    def heard(*_: object) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return torch.zeros(8, 32)

    model: Any = Batcher()._model(_row().version)
    batch = DecodeBatch(replace(model, bases=None), capacity=32, size=8, fixed=True)
    monkeypatch.setattr(type(model), "hidden_states", heard)
    monkeypatch.setattr(decode_model, "is_narrow", lambda hidden: hidden <= narrow)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        batch.logits(torch.zeros(8, dtype=torch.long), torch.zeros(8, dtype=torch.long))
        assert (seen, torch.get_num_threads()) == ([expected], 2)
    finally:
        torch.set_num_threads(before)


def test_capacity_is_a_function_of_the_length() -> None:
    assert [capacity_for(n) for n in (1, 32, 33, 700, 769, 1025)] == [32, 32, 64, 768, 1024, 1536]


def test_lanes_are_checked_before_they_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    batcher, row = Batcher(), _row()
    monkeypatch.setattr("trainer.sampler.batcher.has_independent_rows", lambda batch: False)
    assert batcher._batch_for(row).size == 1


def test_a_lane_whose_rows_depend_on_their_slot_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batcher = Batcher()
    model = batcher._model(_row().version)
    batch = DecodeBatch(model, capacity=64, size=8, fixed=True)
    assert has_independent_rows(batch)
    honest = DecodeBatch.logits

    def slotted(self: DecodeBatch, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return honest(self, tokens, positions) * (1 + 1e-6 * torch.arange(8.0))[:, None]

    monkeypatch.setattr(DecodeBatch, "logits", slotted)
    assert not has_independent_rows(batch)


def _row() -> Completion:
    base = build_base(TINY, {}, device=torch.device("cpu"))
    asked = request(deterministic=True)
    return Completion(
        version=Version(
            "tiny", "", LoadedModel(base, decoder_of(base), Fallback(base)), {}, Scaling(1.0)
        ),
        chat=Chat(base.tokenizer, base.stop_ids),
        stop_ids=base.stop_ids,
        params=asked.params,
        prompt_ids=(1, 2, 3),
        max_new_tokens=4,
        rng=CounterRng(asked.key, seed=0, prompt="p", occurrence=0),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_counts_the_bytes_that_its_cache_takes(dtype: torch.dtype) -> None:
    version = _row().version
    view = replace(
        trainable_view(version.loaded.base.tensors, {}, scaling=Scaling(1.0)), dtype=dtype
    )
    decoder = version.loaded.decoder
    assert decoder is not None
    batch = DecodeBatch(
        decode_model_of(decoder, view, num_bytes=1), capacity=64, size=4, fixed=False
    )
    assert batch.row_bytes == (batch.keys.nbytes + batch.values.nbytes) // 4
    assert row_bytes(decoder, 64, dtype) == batch.row_bytes
