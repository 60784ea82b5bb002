"""Prompts that are read as a tree: each token once, with the bits of whole passes."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from tests.kit.families import SHAPE, random_model
from tests.unit.trainer.sampler.test_decode_model import decoder
from tests.unit.trainer.support import TINY
from trainer.device_thread import limit_threads
from trainer.forward.weights import trainable_view
from trainer.model.base import Base, build_base
from trainer.model.lora_names import Scaling
from trainer.native.supported_models import MOST_HIDDEN
from trainer.sampler import prompt_cache, prompt_tree
from trainer.sampler.decode_model import FusedModel, decode_model_of
from trainer.sampler.prefill import (
    Ids,
    Prompt,
    TorchPrompt,
    have_equal_bits,
    pass_shape,
    read_prompts,
)
from trainer.sampler.prompt_cache import PromptCache
from trainer.sampler.prompt_tree import has_exact_tree, read_tree

WIDE: dict[str, Any] = {
    **SHAPE,
    "hidden_size": 640,
    "intermediate_size": 840,
    "num_hidden_layers": 2,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
}
"""Wider than the models that run in C, with some weights of more than 2 MiB and some of less."""
assert WIDE["hidden_size"] > MOST_HIDDEN


def wide(config: type = LlamaConfig, **changed: Any) -> FusedModel:
    model = random_model(config(**(WIDE | changed)), spread=0.1)
    tokenizer = build_base(TINY, {}, device=torch.device("cpu")).tokenizer
    base = Base(model, tokenizer, dict(model.state_dict()), frozenset(), None)
    view = trainable_view(base.tensors, {}, scaling=Scaling(1.0))
    made = decode_model_of(decoder(base), view, num_bytes=base.num_bytes)
    assert isinstance(made, FusedModel)
    assert not made.is_narrow
    return made


@pytest.fixture(scope="module")
def model() -> FusedModel:
    return wide()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with limit_threads(request.param):
        yield request.param


def alike(num: int, *, length: int, seed: int = 0) -> list[Ids]:
    """Different prompts of one shape, which begin alike and branch at random places. One is the
    beginning of others."""
    draw = random.Random(seed)
    found: dict[Ids, None] = {}
    stem = tuple(draw.randrange(103) for _ in range(length - 20))
    found[stem] = None
    while len(found) < num:
        begun = draw.choice(list(found))[: draw.randrange(length)]
        size = draw.randrange(length - 20, length + 1)
        ids = (*begun, *(draw.randrange(103) for _ in range(length)))[:size]
        found[ids] = None
    return list(found)


def in_passes(model: FusedModel, prompts: list[Ids], shape: tuple[int, int]) -> list[TorchPrompt]:
    size = shape[0]
    chunks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    return [prompt for chunk in chunks for prompt in read_prompts(model, chunk, shape=shape)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("length", "num"), [(32, 70), (64, 5), (96, 1), (128, 3)])
def test_a_tree_has_the_bits_of_whole_passes(model: FusedModel, length: int, num: int) -> None:
    shape = pass_shape(length)
    assert has_exact_tree(model, shape)
    prompts = alike(num, length=length, seed=num)
    found = read_tree(model, prompts, shape=shape, held={})
    assert have_equal_bits(in_passes(model, prompts, shape), [found[ids] for ids in prompts])


@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config])
def test_a_tree_has_the_bits_of_passes_in_other_families(config: type) -> None:
    """With biases, and with norms of the heads."""
    model = wide(config)
    prompts, shape = alike(6, length=64), pass_shape(64)
    found = read_tree(model, prompts, shape=shape, held={})
    assert have_equal_bits(in_passes(model, prompts, shape), [found[ids] for ids in prompts])


def test_a_tree_goes_on_from_prompts_that_were_read_before(model: FusedModel) -> None:
    """Also where a prompt is the beginning of one of them, or its end is in one of them."""
    prompts, shape = alike(10, length=64), pass_shape(64)
    expected = in_passes(model, prompts, shape)
    for first in (1, 6, 9):
        held = dict(zip(prompts[first:], expected[first:], strict=True))
        found = read_tree(model, prompts[:first], shape=shape, held=held)
        assert have_equal_bits(expected[:first], [found[ids] for ids in prompts[:first]])


def test_a_tree_computes_each_token_once(
    model: FusedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    hidden_states = FusedModel.hidden_states

    def counted(self: FusedModel, tokens_N: torch.Tensor, *given: Any, **named: Any) -> Any:
        read.append(len(tokens_N))
        return hidden_states(self, tokens_N, *given, **named)

    monkeypatch.setattr(FusedModel, "hidden_states", counted)
    stem, shape = tuple(range(50)), pass_shape(64)
    prompts = [(*stem, *range(60 + i, 70 + i)) for i in range(8)]
    found = read_tree(model, prompts[:4], shape=shape, held={})
    read_tree(model, prompts[4:], shape=shape, held=found)
    assert read == [50 + 4 * 10 + 6, 4 * 10]


def test_prompts_of_a_wide_model_are_read_as_a_tree(
    model: FusedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the cache, with others of their version and shape. Twin: where the trial fails, in whole
    passes."""
    calls: list[tuple[int, int]] = []

    def counted(
        model: FusedModel, prompts: list[Ids], *, shape: Any, held: dict[Ids, TorchPrompt]
    ) -> dict[Ids, TorchPrompt]:
        calls.append((len(prompts), len(held)))
        return read_tree(model, prompts, shape=shape, held=held)

    monkeypatch.setattr(prompt_cache, "read_tree", counted)
    prompts = alike(8, length=64)
    short = (1, 2, 3)
    found: dict[Ids, Prompt] = {}
    cache = PromptCache()
    for version, some in (
        ("a", [*prompts[:3], short]),
        ("b", prompts[:2]),
        ("a", prompts[2:]),
    ):
        found |= cache.get(version, model, some, native=None)
    assert calls == [(3, 0), (1, 0), (2, 0), (5, 3)]
    monkeypatch.setattr(prompt_cache, "has_exact_tree", lambda *_: False)
    passes = PromptCache().get("a", model, [*prompts, short], native=None)
    assert len(calls) == 4
    pairs = [(passes[ids], found[ids]) for ids in (*prompts, short)]
    assert all(torch.equal(a.logits_V, b.logits_V) for a, b in pairs)


@pytest.mark.parametrize("broken", ["position", "fillings", "order"])
def test_a_tree_with_other_bits_is_found_out(
    model: FusedModel, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A token at the place that it has in the tree, attention that is taken from the fillings, and
    products in another order than those of a whole pass."""
    if broken == "position":
        honest = prompt_tree.prompt_tree

        def shifted(*given: Any) -> Any:
            tree = honest(*given)
            positions = tuple(range(len(tree.tokens)))
            return type(tree)(tree.paths, tree.keys, tree.values, tree.tokens, positions)

        monkeypatch.setattr(prompt_tree, "prompt_tree", shifted)
    elif broken == "fillings":
        places = prompt_tree._places
        monkeypatch.setattr(
            prompt_tree, "_places", lambda tree, **size: places(tree, **size).flip(0)
        )
    else:
        hidden_states = FusedModel.hidden_states

        def rounded(self: FusedModel, *given: Any, rows: int | None = None) -> torch.Tensor:
            found = hidden_states(self, *given, rows=rows)
            return found if rows is None else found * (1 + 2**-23)

        monkeypatch.setattr(FusedModel, "hidden_states", rounded)
    assert not has_exact_tree(model, pass_shape(64))
