"""Small GGUF files: random models that the package `gguf` writes, and headers written byte by byte."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from schemas.models.gguf_model import ARCHITECTURES
from schemas.text import BYTES
from tests.kit.families import random_model

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAIRS = (("h", "e"), ("l", "l"), ("Ġ", "Ġ"), ("he", "ll"), ("e", "Ġ"))
TOKENS = (*SPECIAL, *BYTES, *("".join(pair) for pair in PAIRS))
END = 2
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 0,
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""The names of Transformers and those of llama.cpp."""


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    tied: bool = True,
    kind: str = "F32",
    split: str = "smollm",
    template: str = TEMPLATE,
    metadata: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Write a random model of an architecture, with its matrices in the quantization `kind`, and return
    it. `metadata` replaces entries; None removes one."""
    assert architecture in ARCHITECTURES
    sizes: dict[str, Any] = (
        {} if architecture == "qwen2" else {"head_dim": 32 if architecture == "qwen3" else 16}
    )
    config = CONFIGS[architecture](**SHAPE, **sizes, tie_word_embeddings=tied)  # type: ignore[call-arg]  # of each class
    model = random_model(config)
    entries: dict[str, Any] = {
        **_entries(architecture, config, split, template),
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in entries.items():
        _add(writer, key, value)
    for name, parameter in model.named_parameters():
        if "lm_head" in name and tied:
            continue
        values = parameter.detach().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = SHAPE["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = _neighbours(values, heads)
        for own, theirs in NAMES.items():
            name = name.replace(own, theirs)
        form = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        if form != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(values, form), raw_dtype=form)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _entries(
    architecture: str, config: PreTrainedConfig, split: str, template: str
) -> dict[str, Any]:
    of = f"{architecture}."
    rope: Any = config.rope_parameters
    sizes = {f"{of}attention.key_length": 32} if architecture == "qwen3" else {}
    return {
        "general.name": "tiny",
        f"{of}context_length": 256,
        f"{of}embedding_length": 64,
        f"{of}block_count": 2,
        f"{of}feed_forward_length": 96,
        f"{of}attention.head_count": 4,
        f"{of}attention.head_count_kv": 2,
        f"{of}attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{of}rope.freq_base": float(rope["rope_theta"]),
        **sizes,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in PAIRS],
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": template,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _neighbours(values: "np.ndarray[Any, Any]", heads: int) -> "np.ndarray[Any, Any]":
    """The rows of a projection as llama.cpp has them: the halves of each head are interleaved."""
    num_rows, columns = values.shape
    halves = values.reshape(heads, 2, num_rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(values.shape)


def text(value: str) -> bytes:
    """A string as a GGUF file has it."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    """An entry of the metadata."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: Sequence[int], *, kind: int = 0, offset: int = 0) -> bytes:
    """A line of the table of tensors. `shape` begins with the columns."""
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def header(
    *parts: bytes, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, entries: int = 0
) -> bytes:
    """The beginning of a file, with these numbers of entries and tensors, whatever its `parts` are."""
    return magic + struct.pack("<IQQ", version, tensors, entries) + b"".join(parts)
