"""The texts that the rubrics of an entry point give to judges. The host calls them after the grader."""

import asyncio
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.attempt_output import fail_running
from headrace.error_location import locate_error
from headrace.grading import Sample
from headrace.rubrics import description_of

Json = dict[str, Any]

MOST_RUBRICS = 16
LONGEST_QUESTION = 200_000
"""Characters of a text for a judge."""


def rubrics_of(module: types.ModuleType) -> dict[str, Callable[..., object]]:
    """Return the functions of a module that are marked by @rubric, by name."""
    return {
        name: value for name, value in vars(module).items() if description_of(value) is not None
    }


def described_rubrics(module: types.ModuleType) -> list[Json]:
    """Return the rubrics of a module as the discover role reports them."""
    return [
        {"name": name, **(description_of(function) or {})}
        for name, function in sorted(rubrics_of(module).items())
    ]


async def add_questions(
    grades: Sequence[Json],
    samples: Sequence[Sample],
    message: Json,
    *,
    rubrics: Mapping[str, Callable[..., object]],
    entry: Path,
) -> list[Json]:
    """Return the grades with the texts for judges as `questions`. A rubric that raises, or that returns
    something other than a text or None, fails its one sample."""
    names = [str(name) for name in message.get("rubrics", ())]
    by_index = {sample.index: sample for sample in samples}
    asked = {name: rubrics[name] for name in names}
    return [
        await _with_questions(grade, by_index[grade["index"]], message, asked, entry)
        if names and grade["error"] is None
        else grade
        for grade in grades
    ]


async def _with_questions(
    grade: Json,
    sample: Sample,
    message: Json,
    rubrics: Mapping[str, Callable[..., object]],
    entry: Path,
) -> Json:
    questions: dict[str, str] = {}
    for name, function in rubrics.items():
        try:
            text = function(sample.text, message["label"], extra_info=message["metadata"])
            text = await text if asyncio.iscoroutine(text) else text
        except Exception as error:  # user code raises whatever it likes
            fail_running(error, entry)
            return {**grade, "reward": None, "error": locate_error(error, entry), "raised": True}
        if text is None:
            continue
        if not isinstance(text, str) or len(text) > LONGEST_QUESTION:
            found = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
            why = f"@rubric {name} returned {found}; return text of at most {LONGEST_QUESTION} or None"
            return {**grade, "reward": None, "error": why}
        questions[name] = text
    return {**grade, "questions": questions}
