"""Tiny random shapes of the families that Headrace trains, made from Transformers' own configs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from schemas.models.scratch import scratch_shape
from trainer.model.char_tokenizer import character_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 6,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OLMO3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.2,
    },
}
WINDOW = 8
"""Shorter than the rows of the tests, so that a window that is not kept shows."""
GEMMA3_TEXT: dict[str, Any] = {
    **SHAPE,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
}


def gemma3_with_vision() -> PreTrainedConfig:
    """Gemma 3 from 4B on comes with a vision tower; only its language model is trained."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    ends: dict[str, Any] = {"eos_token_id": 6}
    return Gemma3Config(
        text_config=GEMMA3_TEXT,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=100,
        boi_token_index=101,
        eoi_token_index=102,
        **ends,
    )


@dataclass(frozen=True)
class Family:
    """`lean`: run by our own decoder, not through Transformers' modules."""

    name: str
    config: Callable[[], PreTrainedConfig]
    lean: bool = True


PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
}
SLIDING_TYPES = ["sliding_attention", "full_attention"] * 2


FAMILIES = (
    Family("qwen2.5", lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    Family("qwen3", lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)),
    Family(
        "qwen3-window",
        lambda: Qwen3Config(
            **SHAPE,
            head_dim=16,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=2,
        ),
    ),
    Family(
        "llama3",
        lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    ),
    Family("mistral", lambda: MistralConfig(**SHAPE, head_dim=12, sliding_window=None)),
    Family("mistral-window", lambda: MistralConfig(**SHAPE, sliding_window=WINDOW)),
    Family("smollm2", lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    Family("smollm3", lambda: SmolLM3Config(**SHAPE)),
    Family("olmo2", lambda: Olmo2Config(**SHAPE)),
    Family(
        "olmo3",
        lambda: Olmo3Config(
            **SHAPE, sliding_window=WINDOW, layer_types=SLIDING_TYPES, rope_parameters=OLMO3_ROPES
        ),
    ),
    Family("phi3", lambda: Phi3Config(**SHAPE, rope_parameters=dict(PARTIAL_ROPE))),
    Family("phi3-window", lambda: Phi3Config(**SHAPE, sliding_window=WINDOW)),
    Family(
        "phi3-long",
        lambda: Phi3Config(
            **SHAPE, original_max_position_embeddings=128, rope_parameters=dict(LONG_ROPE)
        ),
        lean=False,
    ),
    Family("glm", lambda: GlmConfig(**SHAPE, head_dim=12, rope_parameters=dict(PARTIAL_ROPE))),
    Family("glm4", lambda: Glm4Config(**SHAPE, head_dim=12, rope_parameters=dict(PARTIAL_ROPE))),
    Family("gemma3", lambda: Gemma3TextConfig(**GEMMA3_TEXT)),
    Family(
        "gemma3-bounded",
        lambda: Gemma3TextConfig(**GEMMA3_TEXT, final_logit_softcapping=5.0),
        lean=False,
    ),
    Family("gemma3-vision", gemma3_with_vision),
)


def family(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def random_model(config: PreTrainedConfig, *, spread: float = 0.05) -> PreTrainedModel:
    """A model with weights that matter: nothing at 0 or 1, biases and norms included."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += spread * torch.randn_like(parameter)
    return model


def save_random_model(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """The drawn model, in `folder` with our tokenizer."""
    model = random_model(config)
    model.save_pretrained(folder)
    character_tokenizer(scratch_shape("qwen3-tiny")).save_pretrained(folder)
    return model
