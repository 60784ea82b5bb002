"""Our masks of a forced answer are those of vLLM's own llguidance, another version than ours, in the
vocabularies of different kinds of tokenizers."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from schemas.models.constraints import Constraint
from schemas.sampling import ToolSpec
from tests.kit.real_vllm import python
from tests.kit.tokenizers import LINES, tokenizer_of
from tests.unit.trainer.model.family_tokenizers import family_tokenizer
from trainer.grammar.answer_grammar import answer_grammar
from trainer.grammar.token_masks import VllmVocabulary, is_allowed
from trainer.model.chat_template import Chat

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.slow]

THEIRS = """
import json, sys
import llguidance, llguidance.hf
from transformers import AutoTokenizer
folder, size = sys.argv[1], int(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
vocabulary = llguidance.hf.from_tokenizer(tokenizer, max(size, len(tokenizer)))
found = []
for grammar, ids in json.load(sys.stdin):
    text = llguidance.grammar_from("grammar", grammar)
    assert not llguidance.LLMatcher.validate_grammar(text, None)
    matcher = llguidance.LLMatcher(vocabulary, text)
    found.append([])
    for token in ids:
        found[-1].append(bytes(matcher.compute_bitmask()).hex())
        matcher.consume_token(token)
print(json.dumps([llguidance.__version__, found]))
"""
NODE = {
    "type": "object",
    "properties": {
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        "label": {"type": "string"},
    },
    "required": ["next", "label"],
}
LIST = {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "maxItems": 3}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object"},
    {"enum": ["\u65e5\u672c \u00e9", "the answer is seven", 'a"b\\c\n', "<tool_call>", "</s>"]},
    {"type": "object", "properties": {"n": {"type": "number"}, "tags": LIST}, "required": ["n"]},
    {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 3, "maximum": 90}},
    {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
)
TOKENIZERS = ("legacy", "unigram", "bytes", "Qwen/Qwen3-4B", "meta-llama/Llama-3.2-1B-Instruct")
PADDING = 5
"""The model has some more logits than its tokenizer has tokens."""


def made(name: str) -> PreTrainedTokenizerFast:
    if "/" in name:
        return family_tokenizer(name)
    tokenizer = tokenizer_of(name)
    tokenizer.chat_template = LINES
    return tokenizer


def drawn(vocabulary: VllmVocabulary, text: str, seed: int) -> tuple[list[int], list[bytes]]:
    """Tokens that were drawn evenly from those that are allowed, up to the end, and their masks."""
    state, rng = vocabulary.start(text), Random(seed)
    ids: list[int] = []
    masks: list[bytes] = []
    while len(ids) < 60 and not set(ids) & set(vocabulary.ends):
        if ids:
            state.advance(ids[-1])
        masks.append(state.allowed)
        allowed = [n for n in range(8 * len(state.allowed)) if is_allowed(state.allowed, n)]
        ids.append(next((n for n in allowed if n in vocabulary.ends), rng.choice(allowed)))
    return ids, masks


def constraints(schema: dict[str, Any]) -> Sequence[tuple[Constraint, tuple[ToolSpec, ...]]]:
    called = ToolSpec(name="ask", parameters=json.dumps(schema))
    return (
        (Constraint(json_schema=json.dumps(schema)), ()),
        (Constraint(calls=("ask",)), (called,)),
    )


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_masks_of_vllms_llguidance_are_ours(name: str, tmp_path: Path) -> None:
    tokenizer = made(name)
    tokenizer.save_pretrained(tmp_path)
    size, stop_ids = len(tokenizer) + PADDING, frozenset({int(tokenizer.eos_token_id or 0)})
    vocabulary = VllmVocabulary(tokenizer, stop_ids, size=size)
    chat, asked, ours = Chat(tokenizer, stop_ids), [], []
    for number, schema in enumerate(SCHEMAS):
        for constraint, tools in constraints(schema):
            if tools and ("/" not in name or "enum" in schema):
                continue  # no syntax of calls, or no object
            text = answer_grammar(
                *(constraint, tools, chat, ()), names=vocabulary.names, ends=vocabulary.ends
            )
            ids, masks = drawn(vocabulary, text, seed=number)
            asked.append([text, ids])
            ours.append([mask.hex() for mask in masks])
    ran = subprocess.run(
        (str(python()), "-c", THEIRS, str(tmp_path), str(size)),
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    version, theirs = json.loads(ran.stdout.splitlines()[-1])
    assert version.startswith("1.7.")
    assert theirs == ours
    assert sum(map(len, ours)) > 100
