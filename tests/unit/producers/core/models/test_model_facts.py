"""The facts about a model that are known before it is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from producers.core.estimates import estimate
from producers.core.models.model_facts import (
    LARGEST_NUMBER,
    ModelFacts,
    facts_of_config,
    model_facts,
)
from schemas.config import RunConfig
from schemas.models.scratch import SHAPES
from schemas.sampling import ModelRef
from schemas.toml.parser import parse_run
from tests.kit.hub import QWEN3_06B

EXPERIMENT = {"rollout": "r", "entrypoint": "main.py", "model_path": "m", "dataset": "d"}


def run(**sections: Any) -> RunConfig:
    return parse_run({"experiment": EXPERIMENT, **sections})


def test_the_size_follows_from_a_config_json() -> None:
    facts = facts_of_config(QWEN3_06B)
    assert facts == ModelFacts(parameters=596_049_920 - 28 * 2 * 128, context=40_960)
    untied = facts_of_config({**QWEN3_06B, "tie_word_embeddings": False})
    assert untied.parameters is not None
    assert facts.parameters is not None
    assert untied.parameters - facts.parameters == 151_936 * 1024
    experts = facts_of_config({**QWEN3_06B, "num_experts": 8, "moe_intermediate_size": 768})
    assert experts.parameters is not None
    assert experts.parameters > facts.parameters
    assert facts_of_config({"text_config": QWEN3_06B}).context == 40_960
    assert facts_of_config({"hidden_size": "wide"}) == ModelFacts()


async def test_a_directory_is_described_by_its_config_and_its_weights(tmp_path: Path) -> None:
    ref = ModelRef(kind="directory", name=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_06B, "dtype": "bfloat16"}))
    no_lookup: Any = None
    assert (await model_facts(ref, no_lookup)).parameters == facts_of_config(QWEN3_06B).parameters
    (tmp_path / "model.safetensors").write_bytes(bytes(2000))
    facts = await model_facts(ref, no_lookup)
    assert (facts.parameters, facts.context) == (1000, 40_960)
    (tmp_path / "config.json").write_text("[")
    assert (await model_facts(ref, no_lookup)).context is None


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
async def test_a_shape_knows_itself(shape: Any) -> None:
    no_lookup: Any = None
    facts = await model_facts(ModelRef(kind="scratch", name=shape.name), no_lookup)
    assert (facts.parameters, facts.context) == (shape.num_parameters, shape.context)
    assert facts.characters


def test_a_number_that_no_model_has_is_not_known() -> None:
    """One such config in the cache would leave `headrace models` without an answer."""
    sizes = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    for digits in (4000, 400, 20):
        huge = dict.fromkeys((*sizes, "max_position_embeddings"), 10**digits)
        assert facts_of_config(huge) == ModelFacts()
    largest = facts_of_config(dict.fromkeys(sizes, LARGEST_NUMBER)).parameters
    assert estimate(run(), largest, steps=1, gpu=False)["parameters"] == largest


def test_an_estimate_needs_the_number_of_parameters_only() -> None:
    config = run(advanced={"tuning": "full"})
    figures = estimate(config, 1_000_000_000, steps=10, gpu=False)
    memory, total_s = figures["memory_bytes"], figures["total_s"]
    assert isinstance(memory, int)
    assert 20e9 < memory < 21e9
    assert isinstance(total_s, float)
    assert total_s > 0
    assert "total_s" not in estimate(config, 1_000_000_000, steps=10, gpu=True)
    half = estimate(run(advanced={"precision": "bfloat16"}), 10**9, steps=1, gpu=True)
    assert isinstance(half["memory_bytes"], int)
    assert half["memory_bytes"] < 3.1e9
    assert estimate(config, None, steps=1, gpu=False)["memory_bytes"] is None
