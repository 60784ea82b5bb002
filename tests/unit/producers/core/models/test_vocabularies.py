"""The texts of tokens, read from a tokenizer.json without a tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from producers.core.models.vocabularies import Vocabularies, scratch_vocabulary, vocabulary_of
from schemas.models.scratch import SHAPES
from schemas.sampling import ModelRef
from schemas.text import BYTES
from trainer.model.char_tokenizer import character_tokenizer
from trainer.model.token_bytes import TokenBytes

NOTHING: Any = None


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_shape_has_the_tokens_that_the_engine_tells(shape: Any) -> None:
    tokenizer = character_tokenizer(shape)
    told = TokenBytes(tokenizer)
    expected = {number: bytes(told.piece(number)) for number in range(len(tokenizer))}
    assert scratch_vocabulary(shape) == expected
    assert vocabulary_of(tokenizer.backend_tokenizer.to_str().encode()) == expected


def test_a_byte_level_vocabulary_has_the_tokens_that_the_engine_tells() -> None:
    inner = Tokenizer(models.BPE({symbol: n for n, symbol in enumerate(BYTES)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    found = vocabulary_of(inner.to_str().encode())
    assert found is not None
    text = "Grüße, \N{GRINNING FACE}\n"
    assert b"".join(found[token] for token in tokenizer.encode(text)).decode() == text
    told = TokenBytes(tokenizer)
    assert found == {n: bytes(told.piece(n)) for n in range(len(tokenizer))}


def test_a_sentencepiece_vocabulary_has_spaces_and_bytes() -> None:
    file = {"model": {"type": "Unigram", "vocab": [["▁Hi", -1.0], ["<0x0A>", -2.0]]}}
    assert vocabulary_of(json.dumps(file).encode()) == {0: b" Hi", 1: b"\n"}


@pytest.mark.parametrize("content", ["", "[]", '{"model": {"vocab": 3}}', "[" * 10_000])
def test_a_file_that_is_no_vocabulary_is_none(content: str) -> None:
    assert vocabulary_of(content.encode()) is None


async def test_a_directory_and_the_cache_of_the_hub_are_read_and_what_is_absent_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabularies = Vocabularies(NOTHING, NOTHING)
    directory = ModelRef(kind="directory", name=str(tmp_path))
    assert await vocabularies.of(directory) is None
    content = json.dumps({"model": {"vocab": {"a": 0}}})
    (tmp_path / "tokenizer.json").write_text(content)
    assert await vocabularies.of(directory) == {0: b"a"}
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--org--name"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("r1")
    hub = ModelRef(kind="hub", name="org/name")
    assert await vocabularies.of(hub) is None
    (place / "snapshots" / "r1").mkdir(parents=True)
    (place / "snapshots" / "r1" / "tokenizer.json").write_text(content)
    assert await vocabularies.of(hub) == {0: b"a"}
