"""The facts about a model that are known without loading it: its size, its context and its characters.

A scratch shape states these facts itself. A directory and a hub id state them in their config.json,
and a GGUF file in its header.
A checkpoint has the facts of the model with which its run started.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from producers.core.lookup import Lookup
from producers.core.models.gguf_file import read_gguf
from producers.core.models.hub import hub_config, parse_object
from schemas.errors import NotFound
from schemas.models.gguf import ENDING
from schemas.models.scratch import CHARACTERS, scratch_shape
from schemas.sampling import ModelRef

MAX_ANCESTORS = 64
LARGEST_NUMBER = 1 << 40
"""No model has a larger number in its config. What is computed from such a number may be too long for
JSON, and too large for an estimate."""
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model. None means that a fact is not known. `context` is the model's number of
    positions. `characters` are those of a character vocabulary (other tokenizers can encode every
    text)."""

    parameters: int | None = None
    context: int | None = None
    characters: str | None = None


async def model_facts(model: ModelRef, lookup: Lookup) -> ModelFacts:
    """The facts about a model. Raises InvalidConfig when the hub should have it and does not."""
    try:
        for _ in range(MAX_ANCESTORS):
            if model.kind != "checkpoint":
                break
            model = (await lookup.run(model.name.rpartition("@")[0])).model
    except NotFound:  # the run was removed and its checkpoint was not
        return ModelFacts()
    match model.kind:
        case "scratch":
            shape = scratch_shape(model.name)
            return ModelFacts(shape.num_parameters, shape.context, CHARACTERS[shape.vocabulary])
        case "directory":
            return await asyncio.to_thread(_directory_facts, Path(model.name))
        case "hub":
            return facts_of_config(await hub_config(model.name))
        case "checkpoint" | "provider":
            return ModelFacts()


def _directory_facts(directory: Path) -> ModelFacts:
    """The facts about a model in a directory or a GGUF file. If the directory holds weights, the number
    of parameters follows from their size, for any architecture."""
    if directory.suffix == ENDING and directory.is_file():
        model = read_gguf(directory)
        return ModelFacts(parameters=model.num_parameters, context=model.shape.context)
    try:
        config = parse_object((directory / "config.json").read_bytes()) or {}
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    except OSError:
        return ModelFacts()
    facts = facts_of_config(config)
    wide = config.get("dtype", config.get("torch_dtype")) in (None, "float32")
    return replace(facts, parameters=size // (4 if wide else 2)) if size else facts


def facts_of_config(config: Mapping[str, Any]) -> ModelFacts:
    """The facts in a config.json. If it describes several models, they are those of the text model."""
    inner = config.get("text_config")
    merged = {**config, **inner} if isinstance(inner, dict) else dict(config)
    context = next((n for key in CONTEXT_KEYS if (n := _positive_integer(merged, key))), None)
    return ModelFacts(parameters=_parameters(merged), context=context)


def _positive_integer(config: Mapping[str, Any], *keys: str) -> int | None:
    """The first of these keys that holds a whole number above 0 that a model may have."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_NUMBER:
            return value
    return None


def _parameters(config: Mapping[str, Any]) -> int | None:
    """The number of parameters of a decoder with grouped-query attention and a gated MLP, including all
    experts if it has several. Of norms and biases only the two norms of each layer are counted."""
    hidden = _positive_integer(config, "hidden_size", "n_embd")
    layers = _positive_integer(config, "num_hidden_layers", "n_layer")
    vocabulary = _positive_integer(config, "vocab_size")
    heads = _positive_integer(config, "num_attention_heads", "n_head")
    if not (hidden and layers and vocabulary and heads):
        return None
    kv_heads = _positive_integer(config, "num_key_value_heads") or heads
    head_dim = _positive_integer(config, "head_dim") or hidden // heads
    experts = _positive_integer(config, "num_experts", "num_local_experts", "n_routed_experts") or 1
    wide = ("moe_intermediate_size",) if experts > 1 else ()
    intermediate = _positive_integer(config, *wide, "intermediate_size", "n_inner") or 4 * hidden
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    layer = attention + 3 * hidden * intermediate * experts + 2 * hidden
    tables = 1 if config.get("tie_word_embeddings", True) else 2
    return tables * vocabulary * hidden + layers * layer + hidden
