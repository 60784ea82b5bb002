"""Which forward pass runs a model, told by its config.json alone."""

from typing import Any

import pytest

from schemas.models.architectures import BOUNDED
from schemas.models.families import (
    LEAN,
    NEW_LEAN_RULES,
    REFUSED,
    TESTED,
    Family,
    forward_pass,
    lean_since,
)

QWEN2: dict[str, Any] = {"model_type": "qwen2", "num_hidden_layers": 24}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama", "architectures": ["LlamaModel"]},
        {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"model_type": "qwen3", "rope_scaling": {"type": "yarn"}},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 4096},
        {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0]},
        {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh"},
        {"model_type": "gemma3_text", "final_logit_softcapping": None},
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"model_type": "olmo3", "rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        {"model_type": "phi3", "sliding_window": 2047, "rope_scaling": None},
        {"model_type": "glm4", "partial_rotary_factor": 0.5},
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
        {"model_type": "llama", "final_logit_softcapping": 30.0},  # Transformers does not read it
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 21},
        QWEN2 | {"use_sliding_window": False, "sliding_window": 4096},
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 24},
        QWEN2 | {"layer_types": ["full_attention"] * 24, "rope_scaling": "nonsense"},
    ],
)
def test_a_known_decoder_is_lean(config: dict[str, Any]) -> None:
    assert forward_pass(config) == LEAN


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            QWEN2 | {"layer_types": ["full_attention", "chunked_attention"]},
            "it has layers of the type 'chunked_attention'",
        ),
        (
            {"model_type": "gemma3_text", "hidden_activation": "gelu"},
            "its activation is 'gelu', not 'gelu_pytorch_tanh'",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "its tokens attend to later ones",
        ),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, BOUNDED),
        ({"model_type": "gemma3", "text_config": {"final_logit_softcapping": 30.0}}, BOUNDED),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope"}},
            "its rotary embedding is scaled by 'longrope'",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "yarn"}},  # longrope for Transformers
            "its rotary embedding is scaled by 'yarn'",
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic"},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            "its rotary embedding is scaled by 'dynamic'",
        ),
        ({"model_type": "llama", "hidden_act": "gelu"}, "its activation is 'gelu', not 'silu'"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "dynamic"}},
            "its rotary embedding is scaled by 'dynamic'",
        ),
        ({"model_type": "olmo"}, "the lean decoder does not compute 'olmo'"),
        (
            {"model_type": "bart", "is_encoder_decoder": True, "architectures": ["BartModel"]},
            "the lean decoder does not compute 'bart'",
        ),
        ({}, "the lean decoder does not compute None"),
        ({"model_type": ["llama"]}, "the lean decoder does not compute ['llama']"),
    ],
)
def test_other_language_models_are_general(config: dict[str, Any], why: str) -> None:
    said = forward_pass(config)
    assert (said.runs, said.why) == ("general", why)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "x" * 10**6},
        {"model_type": "llama", "hidden_act": ["x" * 10**6]},
        {"model_type": "llama", "rope_scaling": {"rope_type": "x" * 10**6}},
        {"model_type": "qwen3", "layer_types": ["x" * 10**6]},
    ],
)
def test_a_reason_is_short(config: dict[str, Any]) -> None:
    assert 20 < len(forward_pass(config).why) < 200


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_a_family_that_is_refused_says_why(family: Family) -> None:
    assert forward_pass({"model_type": family.model_type}) == family.runs
    assert family.runs.runs == "refused"
    assert family.runs.why


def test_the_tested_families_say_why_they_are_not_lean() -> None:
    assert all(bool(family.runs.why) == (family.runs != LEAN) for family in TESTED)


@pytest.mark.parametrize(
    ("config", "rules"),
    [
        ({"model_type": "llama"}, 1),
        ({"model_type": "mistral", "sliding_window": None}, 1),
        ({"model_type": "mistral", "sliding_window": 4096}, NEW_LEAN_RULES),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 24}, 1),
        (QWEN2 | {"use_sliding_window": True}, NEW_LEAN_RULES),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, NEW_LEAN_RULES),
        ({"model_type": "olmo2"}, NEW_LEAN_RULES),
        ({"model_type": "smollm3"}, NEW_LEAN_RULES),
    ],
)
def test_a_run_that_started_earlier_keeps_its_pass(config: dict[str, Any], rules: int) -> None:
    assert lean_since(config) == rules
