"""Sampling through Transformers: rows together say what each says alone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    GPT2Config,
    GraniteConfig,
    Lfm2Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from schemas.sampling import ModelRef
from tests.kit.families import SHAPE, family, random_model, save_random_model
from tests.unit.trainer.support import TINY, request
from tests.unit.trainer.test_families import AGREES, by_the_book
from trainer.engine import Engine
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import Base, build_base
from trainer.sampler import general_batch

PROMPTS = ("2+2", "what is it?", "a much longer question, please", "x", "2+2", "and then?")
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
}
GENERAL = {
    "granite": lambda: GraniteConfig(**SHAPE, logits_scaling=3.0),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **MOE),
    "gemma3-bounded": family("gemma3-bounded").config,
}


def gpt2() -> PreTrainedConfig:
    """Its positions are learned, so that they show."""
    return GPT2Config(
        vocab_size=103,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=6,
    )


def fallback(config: PreTrainedConfig) -> Fallback:
    model = random_model(config)
    tokenizer = build_base(TINY, {}, device=torch.device("cpu")).tokenizer
    return Fallback(Base(model, tokenizer, dict(model.state_dict()), frozenset(), None))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each pass read."""
    found: list[int] = []
    real = Fallback._extend

    def counted(
        self: Fallback, trained: Any, scaling: Any, ids: torch.Tensor, *a: Any, **k: Any
    ) -> Any:
        found.append(len(ids))
        return real(self, trained, scaling, ids, *a, **k)

    monkeypatch.setattr(Fallback, "_extend", counted)
    return found


@pytest.mark.parametrize("name", GENERAL)
async def test_rows_together_are_the_plain_loop(
    name: str, engine: Engine, tmp_path: Path, reads: list[int]
) -> None:
    plain = save_random_model(GENERAL[name](), tmp_path)
    ref = ModelRef(kind="directory", name=str(tmp_path))
    await engine.sampler.sample(request("first", model=ref, max_new_tokens=1))  # loads and probes
    reads.clear()
    asked = [
        request(prompt, sample=i, model=ref, max_new_tokens=4 + 3 * i)
        for i, prompt in enumerate(PROMPTS)
    ]
    turns = await asyncio.gather(*(engine.sampler.sample(one) for one in asked))
    assert max(reads) > 1, "they were sampled together"
    assert len(reads) < sum(len(turn.completion_ids) for turn in turns)
    for one, turn in zip(asked, turns, strict=True):
        book = by_the_book(plain, one, turn.prompt_ids)
        assert turn.completion_ids == book.completion_ids
        assert turn.logprobs == pytest.approx(book.logprobs, abs=AGREES)


async def test_a_row_of_a_deterministic_run_is_alone(
    engine: Engine, tmp_path: Path, reads: list[int]
) -> None:
    """Its bits may not depend on which rows have arrived with it."""
    save_random_model(GENERAL["granite"](), tmp_path)
    ref = ModelRef(kind="directory", name=str(tmp_path))
    asked = [
        request(prompt, sample=i, model=ref, deterministic=True, max_new_tokens=5)
        for i, prompt in enumerate(PROMPTS)
    ]
    together = await asyncio.gather(*(engine.sampler.sample(one) for one in asked))
    assert set(reads) == {1}
    assert [await engine.sampler.sample(one) for one in asked] == together


async def test_few_rows_are_together_where_memory_is_small(
    engine: Engine, tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_model(GENERAL["granite"](), tmp_path)
    ref = ModelRef(kind="directory", name=str(tmp_path))
    monkeypatch.setattr(general_batch, "MOST_ROWS", 2)
    asked = [request(sample=i, model=ref, max_new_tokens=3) for i in range(5)]
    await asyncio.gather(*(engine.sampler.sample(one) for one in asked))
    assert max(reads) == 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (lambda: CohereConfig(**SHAPE), True),
        (gpt2, True),
        (lambda: Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"] * 2), False),
        (family("phi3-long").config, False),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_rows_depend_on_others_samples_them_alone(
    config: Any, expected: bool
) -> None:
    """Lfm2 keeps a state, and longrope looks at the longest row."""
    assert fallback(config()).has_independent_rows == expected


@pytest.mark.parametrize(("name", "is_plain"), [("granite", False), ("qwen3_moe", True)])
def test_scaled_logits_are_not_taken_from_the_head(name: str, is_plain: bool) -> None:
    assert fallback(GENERAL[name]()).has_plain_head == is_plain
