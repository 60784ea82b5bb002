"""`[advanced.curriculum]`: what contradicts itself, or would not be read, is refused by name."""

import json
from typing import Any

import pytest

from schemas.algorithms import replacements
from schemas.config import Advanced
from schemas.limits import MOST_MOVED_ROWS, groups_per_step
from tests.kit.specs import config
from tests.kit.tomls import run_issues

TABLE = "advanced.curriculum"


def refused(table: dict[str, Any], *, batch: int = 32, **advanced: Any) -> dict[str, str]:
    """The errors for this table, as key -> message."""
    document = {
        "experiment": {
            "rollout": "r",
            "entrypoint": "main.py",
            "model_path": "m",
            "dataset": "d",
        },
        "training": {"n_samples_per_prompt": 2, "rollout_batch_size": batch},
        "advanced": {**advanced, "curriculum": table},
    }
    return {issue.key: issue.message for issue in run_issues(document)}


@pytest.mark.parametrize(
    "table",
    [
        {"min_pass_rate": 0.05},
        {"max_pass_rate": 0.95, "easy_fraction": 0.1, "pass_reward": 0.5},
        {"min_pass_rate": 0.1, "max_pass_rate": 0.9, "hard_fraction": 0.4, "easy_fraction": 0.5},
        {"oversampling_factor": 1.5},
    ],
)
def test_a_table_is_read(table: dict[str, Any]) -> None:
    assert refused(table) == {}


@pytest.mark.parametrize(
    ("table", "key", "says"),
    [
        ({}, "", "sets neither min_pass_rate, max_pass_rate nor oversampling_factor; set one"),
        ({"min_pass_rate": 0.0}, ".min_pass_rate", "must be greater than 0, got 0"),
        ({"max_pass_rate": 1.0}, ".max_pass_rate", "must be less than 1, got 1"),
        (
            {"min_pass_rate": 0.5, "max_pass_rate": 0.5},
            ".min_pass_rate",
            "must be below max_pass_rate (0.5), got 0.5",
        ),
        (
            {"max_pass_rate": 0.9, "hard_fraction": 0.1},
            ".hard_fraction",
            "needs advanced.curriculum.min_pass_rate; set it, or leave this key out",
        ),
        ({"min_pass_rate": 0.1, "easy_fraction": 0.1}, ".easy_fraction", "needs"),
        (
            {
                "min_pass_rate": 0.1,
                "max_pass_rate": 0.9,
                "easy_fraction": 0.6,
                "hard_fraction": 0.4,
            },
            ".easy_fraction",
            "must be below 1 together with hard_fraction, got 1",
        ),
        ({"oversampling_factor": 2.0, "pass_reward": 0.5}, ".pass_reward", "needs min_pass_rate"),
        ({"oversampling_factor": 1.0}, ".oversampling_factor", "must be greater than 1, got 1"),
        ({"oversampling_factor": 5.0}, ".oversampling_factor", "must be at most 4, got 5"),
        ({"min_pas_rate": 0.1}, ".min_pas_rate", "unrecognized key"),
        ({"min_pass_rate": "low"}, ".min_pass_rate", "must be a number"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused_by_key(
    table: dict[str, Any], key: str, says: str
) -> None:
    found = refused(table)
    assert list(found) == [TABLE + key]
    assert found[TABLE + key].startswith(says)


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_plus_plus"])
def test_oversampling_is_refused_where_equal_rewards_teach_too(algorithm: str) -> None:
    assert (
        "equal rewards too"
        in refused({"oversampling_factor": 2.0}, algorithm=algorithm)[
            f"{TABLE}.oversampling_factor"
        ]
    )
    assert refused({"max_pass_rate": 0.9}, algorithm=algorithm) == {}


def test_more_moved_rows_than_an_event_holds_are_refused() -> None:
    keys = {"algorithm": "dapo", "max_replacements": 64}
    (message,) = refused({"max_pass_rate": 0.9}, batch=100, **keys).values()
    assert f"may move 6500 rows in a step, and one event holds {MOST_MOVED_ROWS}" in message
    assert refused({"oversampling_factor": 2.0}, batch=100, **keys) == {}


@pytest.mark.parametrize("name", ["min_pass_rate", "easy_threshold", "oversampling_factor"])
def test_a_key_beside_the_table_is_shown_the_table(name: str) -> None:
    document = {
        "experiment": {"rollout": "r", "entrypoint": "m.py", "model_path": "m", "dataset": "d"},
        "advanced": {name: 0.5},
    }
    (issue,) = run_issues(document)
    assert (issue.key, issue.did_you_mean) == (f"advanced.{name}", TABLE)


def test_a_config_without_the_table_is_written_as_before() -> None:
    assert "curriculum" not in json.loads(config().model_dump_json())["advanced"]


def test_groups_that_are_sampled_as_well_take_the_place_of_replacements() -> None:
    over = {"algorithm": "dapo", "curriculum": {"oversampling_factor": 1.5}}
    assert replacements(Advanced.model_validate(over)) == 0
    assert replacements(Advanced.model_validate({**over, "max_replacements": 3})) == 3
    assert replacements(Advanced(algorithm="dapo")) == 4
    assert groups_per_step(config(advanced=over)) == 48
