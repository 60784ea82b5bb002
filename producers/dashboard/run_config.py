"""The config of a run as people read it: what differs from the defaults, and the TOMLs of what may
follow from it, a run that goes on from a checkpoint and an evaluation of one."""

import json
from collections.abc import Mapping
from typing import Any

import tomli_w
from pydantic import ValidationError

from schemas.config import EvalAdvanced, RunConfig

LENGTHS = ("max_prompt_length", "max_response_length", "max_answer_length")


def chosen_keys(config: str) -> dict[str, Any]:
    """The sections of a config (JSON) with the keys that differ from their defaults. Keys that have no
    default are always among them. A config that another version recorded, with keys that this one
    does not know, is returned as a whole."""
    try:
        found = RunConfig.model_validate_json(config)
    except ValidationError:
        return _without_none(json.loads(config))
    return found.model_dump(mode="json", exclude_defaults=True, exclude_none=True)


def _without_none(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The same sections without the keys that have no value, which TOML cannot hold."""
    return {
        name: {key: value for key, value in keys.items() if value is not None}
        for name, keys in sections.items()
    }


def flat_keys(config: str) -> list[tuple[str, str]]:
    """The same as (`section.key`, value as JSON), in the order of the sections."""
    return [
        (f"{section}.{key}", json.dumps(value, ensure_ascii=False))
        for section, keys in chosen_keys(config).items()
        for key, value in keys.items()
    ]


def config_toml(config: str) -> str:
    """The TOML of a config. Keys that have their default are left out."""
    return tomli_w.dumps(chosen_keys(config))


def fork_toml(config: str, checkpoint: str) -> str:
    """The TOML of a run with the same config that starts from a checkpoint."""
    keys = chosen_keys(config)
    return tomli_w.dumps({**keys, "experiment": {**keys["experiment"], "model_path": checkpoint}})


def evaluation_toml(config: str, checkpoint: str) -> str:
    """The TOML of an evaluation of a run's checkpoint: on the run's validation dataset if it has one,
    with the same code, lengths and rewards, and with greedy answers."""
    keys = chosen_keys(config)
    advanced = keys.get("advanced", {})
    experiment = {**keys["experiment"], "model_path": checkpoint}
    experiment["dataset"] = advanced.get("validation_dataset") or experiment["dataset"]
    training = keys.get("training", {})
    document: dict[str, Mapping[str, Any]] = {
        "experiment": experiment,
        "evaluation": {"limit": 100, "batch_size": 20},
        "advanced": {
            **{key: advanced[key] for key in EvalAdvanced.model_fields if key in advanced},
            **{key: training[key] for key in LENGTHS if key in training},
            "temperature": 0.0,
        },
    }
    for key in ("env", "secrets"):
        if keys.get(key):
            document[key] = keys[key]
    return tomli_w.dumps(document)
