"""A name of generated tasks means one dataset, and a wrong one says what to write."""

import pytest

from schemas.errors import InvalidConfig
from schemas.toml.generated_tasks import PACKAGE, dataset_name, parse_generated

SUMS = "reasoning-gym:chain_sum?max_terms=3&max_digits=1"


def test_a_name_is_read() -> None:
    tasks = parse_generated(f"{SUMS}&size=40&seed=7&split=held_out")
    assert tasks.request == {
        "package": PACKAGE,
        "task": "chain_sum",
        "parameters": {"max_digits": 1, "max_terms": 3},
        "split": "held_out",
        "size": 40,
        "seed": 7,
    }


def test_values_are_json_or_text() -> None:
    tasks = parse_generated(
        'reasoning-gym:basic_arithmetic?operators=["+","-"]&format_style=natural&a=1.5&b=false&c=%26'
    )
    assert tasks.request["parameters"] == {
        "operators": ["+", "-"],
        "format_style": "natural",
        "a": 1.5,
        "b": False,
        "c": "&",
    }


def test_the_order_of_keys_and_the_defaults_do_not_change_the_dataset() -> None:
    same = "reasoning-gym:chain_sum?seed=0&max_digits=1&split=train&size=500&max_terms=3"
    assert dataset_name(SUMS) == dataset_name(same)
    assert dataset_name(SUMS).startswith("reasoning-gym.chain_sum.train.")


@pytest.mark.parametrize(
    "other", ["size=499", "seed=1", "split=held_out", "min_terms=2", "allow_negation=true"]
)
def test_everything_that_the_rows_depend_on_changes_the_dataset(other: str) -> None:
    assert dataset_name(f"{SUMS}&{other}") != dataset_name(SUMS)


def test_another_name_is_left_alone() -> None:
    assert dataset_name("arithmetic-rl") == "arithmetic-rl"


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        ("reasoning-gym:", "does not name a task; write it like reasoning-gym:chain_sum"),
        ("reasoning-gym:../x", "does not name a task"),
        ("reasoning-gym:Chain Sum", "does not name a task"),
        ("reasoning-gym:a?size", "'size' in .* is not key=value"),
        ("reasoning-gym:a?=3", "is not key=value"),
        ("reasoning-gym:a?max-terms=3", "is not key=value"),
        ("reasoning-gym:a?size=5&size=6", "size occurs twice"),
        ("reasoning-gym:a?size=0", "is 0; write a whole number from 4 to 100000"),
        ("reasoning-gym:a?size=3", "is 3; write a whole number from 4"),
        ("reasoning-gym:a?size=100001", "from 4 to 100000"),
        ("reasoning-gym:a?size=10.0", "size in .* is 10.0; write a whole number"),
        ("reasoning-gym:a?size=true", "size in .* is True; write a whole number"),
        ("reasoning-gym:a?size=" + "9" * 5000, "has 50.. characters; write at most 2000"),
        ("reasoning-gym:a?size=" + "9" * 1900, "write a whole number from 4 to 100000"),
        ("reasoning-gym:a?seed=-1", "seed in .* is -1; write a whole number from 0"),
        ("reasoning-gym:a?seed=x", "seed in .* is x; write a whole number"),
        ("reasoning-gym:a?split=test", "'test'; use one of: train, held_out"),
        ("reasoning-gym:a?split=[" + "[" * 1900, "use one of: train, held_out"),
    ],
)
def test_a_wrong_name_says_what_to_write(ref: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        parse_generated(ref)
