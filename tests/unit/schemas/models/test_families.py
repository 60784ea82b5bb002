"""Which forward pass runs a model, told by its config.json alone."""

from typing import Any

import pytest

from schemas.models.families import LEAN, REFUSED, TESTED, WINDOW, Family, forward_pass

QWEN2: dict[str, Any] = {"model_type": "qwen2", "num_hidden_layers": 24}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama", "architectures": ["LlamaModel"]},
        {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"model_type": "qwen3", "rope_scaling": {"type": "yarn"}},
        {"model_type": "mistral", "sliding_window": None},
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
        ({"model_type": "mistral", "sliding_window": 4096}, WINDOW),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 21}, WINDOW),
        (QWEN2 | {"use_sliding_window": True}, WINDOW),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, WINDOW),
        ({"model_type": "llama", "hidden_act": "gelu"}, "its activation is 'gelu', not 'silu'"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "dynamic"}},
            "its rotary embedding is scaled by 'dynamic'",
        ),
        ({"model_type": "olmo2"}, "the lean decoder does not compute 'olmo2'"),
        (
            {"model_type": "bart", "is_encoder_decoder": True, "architectures": ["BartModel"]},
            "the lean decoder does not compute 'bart'",
        ),
        ({}, "the lean decoder does not compute None"),
    ],
)
def test_other_language_models_are_general(config: dict[str, Any], why: str) -> None:
    said = forward_pass(config)
    assert (said.runs, said.why) == ("general", why)


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_a_family_that_is_refused_says_why(family: Family) -> None:
    assert forward_pass({"model_type": family.model_type}) == family.runs
    assert family.runs.runs == "refused"
    assert family.runs.why


def test_the_tested_families_say_why_they_are_not_lean() -> None:
    assert all(bool(family.runs.why) == (family.runs != LEAN) for family in TESTED)
