"""What differs from the defaults, and the TOMLs that are made of it, can be submitted again."""

import json
import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from producers.dashboard.run_config import (
    chosen_keys,
    config_toml,
    evaluation_toml,
    flat_keys,
    fork_toml,
)
from schemas.toml.parser import parse_eval, parse_run
from tests.kit.specs import config

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)


def json_of(**sections: dict[str, Any]) -> str:
    return config(**sections).model_dump_json()


def test_only_what_differs_is_shown() -> None:
    found = chosen_keys(json_of(training={"lr": 5e-4}, advanced={"algorithm": "gspo"}))
    assert found["training"] == {"lr": 5e-4}
    assert ("advanced.algorithm", '"gspo"') in flat_keys(json_of(advanced={"algorithm": "gspo"}))


@given(name=TEXTS, criteria=TEXTS)
def test_the_toml_is_the_same_config(name: str, criteria: str) -> None:
    rubric = {"text": criteria, "model": "openai/judge", "scale": [0, 10]}
    document = json.loads(json_of(advanced={"validation_dataset": name}))
    document["advanced"] |= {"network": ["a.example:443"], "rubrics": [rubric]}
    given_config = parse_run(
        {key: chosen for key, chosen in _without_none(document).items() if chosen}
    )
    text = config_toml(given_config.model_dump_json())
    assert parse_run(tomllib.loads(text)) == given_config


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return value


def test_a_config_of_another_version_is_shown_as_a_whole() -> None:
    old = json.loads(json_of()) | {"training": {"lr": 1e-6, "momentum": 0.9, "gone": None}}
    assert ("training.momentum", "0.9") in flat_keys(json.dumps(old))
    assert tomllib.loads(config_toml(json.dumps(old)))["training"] == {"lr": 1e-6, "momentum": 0.9}


def test_a_fork_starts_from_the_checkpoint_and_keeps_the_rest() -> None:
    made = parse_run(tomllib.loads(fork_toml(json_of(), "first@40")))
    assert made.experiment.model_path == "first@40"
    assert made.training == config().training


def test_an_evaluation_asks_the_validation_dataset_greedily() -> None:
    given_json = json_of(
        training={"max_response_length": 77}, advanced={"validation_dataset": "held-out"}
    )
    made = parse_eval(tomllib.loads(evaluation_toml(given_json, "first@best")))
    assert made.experiment.dataset == "held-out"
    assert made.experiment.model_path == "first@best"
    assert (made.advanced.temperature, made.advanced.max_response_length) == (0.0, 77)
    plain = parse_eval(tomllib.loads(evaluation_toml(json_of(), "first@1")))
    assert plain.experiment.dataset == config().experiment.dataset
