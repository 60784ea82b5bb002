"""A provider's model can be evaluated and not trained, and its keys need one."""

from typing import Any

import pytest

from schemas.toml.config_issues import config_issues
from schemas.toml.parser import parse_eval, parse_run

EXPERIMENT = {"rollout": "r", "entrypoint": "main.py", "dataset": "d"}


def eval_issues(path: str, **advanced: Any) -> list[str]:
    experiment = {**EXPERIMENT, "model_path": path}
    return [
        i.key for i in config_issues(parse_eval({"experiment": experiment, "advanced": advanced}))
    ]


def test_an_evaluation_may_name_a_providers_model_with_its_bounds() -> None:
    bounds = {"max_usd": 1.5, "usd_per_million": [1.0, 2.0], "max_calls": 10}
    assert eval_issues("provider:openai/gpt-5-mini", **bounds) == []
    own = {"base_url": "http://10.0.0.5/v1", "api_key_secret": "MY_KEY"}
    assert eval_issues("provider:small", **own) == []
    assert eval_issues("provider:openrouter/a/b", max_usd=1.0) == []


@pytest.mark.parametrize(
    ("path", "advanced", "key"),
    [
        ("scratch:qwen3-tiny", {"base_url": "https://a/v1"}, "advanced.base_url"),
        ("scratch:qwen3-tiny", {"max_usd": 1.0}, "advanced.max_usd"),
        ("provider:openai/m", {"max_usd": 1.0}, "advanced.max_usd"),
        ("provider:openai/m", {"deterministic": True}, "advanced.deterministic"),
        ("provider:m", {"usd_per_million": [1.0, -1.0]}, "advanced.usd_per_million"),
    ],
)
def test_other_combinations_are_refused_by_key(
    path: str, advanced: dict[str, Any], key: str
) -> None:
    assert eval_issues(path, **advanced) == [key]


def test_a_run_cannot_train_a_providers_model() -> None:
    config = parse_run({"experiment": {**EXPERIMENT, "model_path": "provider:openai/m"}})
    issues = [issue for issue in config_issues(config) if issue.key == "experiment.model_path"]
    assert "no weights to train" in issues[0].message
