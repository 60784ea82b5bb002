"""Rubrics of an entry point: their criteria are found, and their functions say what judges read."""

from pathlib import Path
from typing import Any

import pytest

from headrace import rubric
from headrace.attempt_output import AttemptOutput, running
from headrace.grading import Sample
from headrace.user_code.discovery import load
from headrace.user_code.questions import (
    LONGEST_QUESTION,
    add_questions,
    described_rubrics,
    rubrics_of,
)

MAIN = """
from headrace import rubric

@rubric("Is it polite?", model="openai/gpt-5-mini", scale=(1, 5), usd_per_million=(1, 2))
def polite(solution_str, ground_truth, extra_info=None, **kwargs):
    return None

@rubric("Is it short?", model="small", base_url="http://10.0.0.5/v1", api_key_secret="MINE")
async def brief(solution_str, ground_truth, extra_info=None, **kwargs):
    if solution_str == "raise":
        raise ValueError("as asked")
    if solution_str == "number":
        return 3
    if solution_str == "long":
        return "x" * 200_001
    return f"{solution_str}/{ground_truth}/{extra_info}"
"""


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts" / "say" / "main.py"
    path.parent.mkdir(parents=True)
    path.write_text(MAIN)
    return path


def test_the_criteria_are_found(entry: Path) -> None:
    brief, polite = described_rubrics(load(entry))
    assert polite == {
        "name": "polite",
        "text": "Is it polite?",
        "model": "openai/gpt-5-mini",
        "low": 1.0,
        "high": 5.0,
        "base_url": None,
        "api_key_secret": None,
        "usd_per_million": [1.0, 2.0],
    }
    assert (brief["base_url"], brief["api_key_secret"]) == ("http://10.0.0.5/v1", "MINE")


async def questions(entry: Path, text: str, *names: str) -> dict[str, Any]:
    samples = [Sample("sample_0", 0, text, [])]
    grades = [{"index": 0, "reward": 0.5, "parts": {}, "error": None}]
    message = {"label": "4", "metadata": {"a": 1}, "rubrics": list(names)}
    rubrics = rubrics_of(load(entry))
    [grade] = await add_questions(grades, samples, message, rubrics=rubrics, entry=entry)
    return grade


async def test_a_function_says_what_the_judge_reads(entry: Path) -> None:
    grade = await questions(entry, "3", "polite", "brief")
    assert grade["questions"] == {"brief": "3/4/{'a': 1}"}
    assert grade["reward"] == 0.5
    assert "questions" not in await questions(entry, "raise")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise", "rollouts/say/main.py:11 in brief: ValueError: as asked"),
        ("number", "@rubric brief returned int; return text"),
        ("long", f"returned 200001 characters; return text of at most {LONGEST_QUESTION}"),
    ],
)
async def test_a_function_that_fails_fails_its_sample(entry: Path, text: str, says: str) -> None:
    grade = await questions(entry, text, "brief")
    assert says in grade["error"]
    assert grade["reward"] is None


async def test_the_traceback_of_a_function_that_raises_is_kept(entry: Path) -> None:
    output = AttemptOutput()
    running.set(output)
    await questions(entry, "raise", "brief")
    assert "main.py" in str((output.document() or {})["traceback"])


async def test_a_sample_without_a_reward_is_not_asked_about(entry: Path) -> None:
    failed: list[Any] = [{"index": 0, "reward": None, "parts": {}, "error": "no reward"}]
    message: Any = {"label": None, "metadata": {}, "rubrics": ["brief"]}
    samples = [Sample("sample_0", 0, "raise", [])]
    rubrics = rubrics_of(load(entry))
    assert await add_questions(failed, samples, message, rubrics=rubrics, entry=entry) == failed


@pytest.mark.parametrize(
    "arguments",
    [
        {"criteria": "", "model": "m"},
        {"criteria": "x" * 4001, "model": "m"},
        {"criteria": "x", "model": ""},
        {"criteria": "x", "model": "m", "scale": (1, 1)},
        {"criteria": "x", "model": "m", "scale": (0, float("inf"))},
        {"criteria": "x", "model": "m", "usd_per_million": (float("nan"), 1)},
        {"criteria": "x", "model": "m", "usd_per_million": (-1, 1)},
        {"criteria": "x", "model": "m", "usd_per_million": (1,)},
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rubric"):
        rubric(arguments.pop("criteria"), **arguments)


def test_a_rubric_has_the_signature_of_a_reward_function() -> None:
    with pytest.raises(TypeError, match="@rubric <lambda> must have the signature"):
        rubric("x", model="m")(lambda answer: None)
