"""Masks in the vocabularies of different kinds of tokenizers: what a schema allows is drawn."""

import json
from random import Random
from typing import Any

import pytest

from schemas.errors import UserCodeError
from tests.kit.tokenizers import PREFIXED, Kind, tokenizer_of
from trainer.grammar.token_masks import GrammarVocabulary, is_allowed


def draw(kind: Kind, schema: dict[str, Any], *, seed: int = 0) -> str:
    """An answer to a schema, each token of which is drawn evenly from those that are allowed."""
    tokenizer, rng = tokenizer_of(kind), Random(seed)
    end = tokenizer.eos_token_id
    vocabulary = GrammarVocabulary(tokenizer, frozenset({end}), size=len(tokenizer))
    state = vocabulary.start(f"start: %json {json.dumps(schema)}")
    drawn = b""
    while True:
        allowed = [n for n in range(len(tokenizer)) if is_allowed(state.allowed, n)]
        token = rng.choice(allowed)
        if token == end:
            return drawn.decode()
        drawn += vocabulary.tokens[token]
        state.advance(token)


@pytest.mark.parametrize("kind", [*PREFIXED, "bytes"])
def test_a_tokenizer_that_begins_with_a_space_draws_what_a_schema_allows(kind: Kind) -> None:
    texts = ["the answer is seven", "I am well", "\n", "\u00e9\u65e5", " "]
    for text in texts:
        assert json.loads(draw(kind, {"const": text})) == text
        assert json.loads(draw(kind, {"const": {text: [text]}})) == {text: [text]}
    for seed in range(8):
        assert json.loads(draw(kind, {"enum": texts}, seed=seed)) in texts


@pytest.mark.parametrize("kind", [*PREFIXED, "bytes"])
def test_the_name_of_a_special_token_is_a_text_like_any_other(kind: Kind) -> None:
    for text in ("</s>", "<unk></s>", "so </s> it is"):
        assert json.loads(draw(kind, {"const": text})) == text


def test_a_model_without_a_token_that_ends_an_answer_is_refused() -> None:
    with pytest.raises(UserCodeError, match="no token that ends an answer"):
        GrammarVocabulary(tokenizer_of("bytes"), frozenset(), size=300)
