"""The `scratch:` shapes: small models that ship with Headrace and are built from a seed alone.

This table does not need torch, so the control process can list the shapes and use them in estimates.
The trainer builds the weights (`trainer/model/base.py`) and the tokenizer
(`trainer/model/char_tokenizer.py`). A shape never changes once it is released, because
`scratch:NAME` and a seed must always mean the same weights.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

from schemas.errors import InvalidConfig, Issue

PREFIX = "scratch:"

SPECIAL_TOKENS = (
    "<|pad|>",
    "<|unk|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
)
"""The chat symbols of every character vocabulary, in the order of their ids (from 0)."""

Vocabulary = Literal["arithmetic", "ascii"]

CHARACTERS: dict[Vocabulary, str] = {
    "arithmetic": "0123456789+=? Whatis",
    "ascii": "\n" + "".join(map(chr, range(32, 127))),
}
"""The characters of each vocabulary, one symbol each. Any other character becomes `<|unk|>`."""


@dataclass(frozen=True, slots=True)
class ScratchShape:
    """One shape: grouped-query attention, a gated MLP, tied embeddings, fp32."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: Vocabulary
    context: int
    architecture: Literal["qwen3"] = "qwen3"

    @property
    def model_path(self) -> str:
        """The name by which a TOML refers to it."""
        return PREFIX + self.name

    @property
    def vocabulary_size(self) -> int:
        return len(SPECIAL_TOKENS) + len(CHARACTERS[self.vocabulary])

    @property
    def num_parameters(self) -> int:
        """The number of parameters. Tied embeddings are counted once."""
        query, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + 2 * keys) + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.vocabulary_size * self.hidden + self.hidden


SHAPES: tuple[ScratchShape, ...] = (
    ScratchShape(
        name="qwen3-tiny",
        hidden=32,
        intermediate=64,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        vocabulary="ascii",
        context=1024,
    ),
    ScratchShape(
        name="qwen3-2m",
        hidden=256,
        intermediate=512,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=64,
        vocabulary="arithmetic",
        context=1024,
    ),
    ScratchShape(
        name="qwen3-2m-ascii",
        hidden=256,
        intermediate=512,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=64,
        vocabulary="ascii",
        context=1024,
    ),
    ScratchShape(
        name="qwen3-4m",
        hidden=256,
        intermediate=704,
        layers=5,
        heads=4,
        kv_heads=2,
        head_dim=64,
        vocabulary="ascii",
        context=2048,
    ),
)


def scratch_shape(name: str) -> ScratchShape:
    """The shape called `name` (with or without `scratch:`). Raises InvalidConfig."""
    bare = name.removeprefix(PREFIX)
    known = {shape.name: shape for shape in SHAPES}
    if bare in known:
        return known[bare]
    close = difflib.get_close_matches(bare, known, n=1)
    meant = PREFIX + close[0] if close else None
    names = ", ".join(shape.model_path for shape in SHAPES)
    message = f"there is no shape {PREFIX}{bare}; use one of: {names}"
    issue = Issue(key="model", message=message, did_you_mean=meant)
    raise InvalidConfig(message, issues=(issue,))


def describe_shapes() -> list[dict[str, object]]:
    """The models that are made from a seed, as JSON."""
    return [
        {
            "name": shape.model_path,
            "kind": "scratch",
            "parameters": shape.num_parameters,
            "context": shape.context,
            "vocabulary": shape.vocabulary_size,
            "runs": "lean",
            "why": "",
        }
        for shape in SHAPES
    ]
