"""Lengths that exceed the positions of the model."""

from typing import Any

import pytest

from producers.core.validation.model_issues import length_issues
from schemas.config import RunConfig
from schemas.toml.parser import parse_eval, parse_run

EXPERIMENT = {"rollout": "r", "entrypoint": "main.py", "model_path": "m", "dataset": "d"}


def run(**sections: Any) -> RunConfig:
    return parse_run({"experiment": EXPERIMENT, **sections})


@pytest.mark.parametrize(
    ("training", "keys"),
    [
        ({}, []),
        ({"max_prompt_length": 1024}, ["training.max_prompt_length"]),
        ({"max_prompt_length": 1023}, []),
        ({"max_response_length": 1024}, ["training.max_response_length"]),
        (
            {"max_prompt_length": 2000, "max_response_length": 2000},
            ["training.max_prompt_length", "training.max_response_length"],
        ),
        ({"max_prompt_length": 512, "max_response_length": 512}, []),
        ({"max_response_length": 2000, "max_answer_length": 512}, []),
        (
            {"max_prompt_length": 512, "max_response_length": 2000, "max_answer_length": 513},
            ["training.max_answer_length"],
        ),
        (
            {"max_prompt_length": 512, "max_response_length": 513},
            ["training.max_response_length"],
        ),
    ],
)
def test_lengths_beyond_the_context_are_refused(training: dict[str, int], keys: list[str]) -> None:
    issues = list(length_issues(run(training=training), 1024))
    assert [issue.key for issue in issues] == keys
    assert all("the model has 1024 positions" in issue.message for issue in issues)
    assert not list(length_issues(run(training=training), None))


def test_sft_and_evaluations_have_their_own_lengths() -> None:
    sft = run(advanced={"algorithm": "sft", "max_sequence_length": 1025})
    assert [i.key for i in length_issues(sft, 1024)] == ["advanced.max_sequence_length"]
    assert not list(length_issues(run(advanced={"algorithm": "sft"}), 1024))
    evaluation = parse_eval({"experiment": EXPERIMENT, "advanced": {"max_prompt_length": 4096}})
    assert [i.key for i in length_issues(evaluation, 1024)] == ["advanced.max_prompt_length"]
