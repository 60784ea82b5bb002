"""Rows of generated tasks: different questions, splits that share none, and the package's own scorer."""

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import reasoning_tasks
from headrace.reasoning_tasks import Unfit, is_held_out, make_rows, score
from schemas.toml.generated_tasks import PACKAGE, parse_generated
from tests.kit.reasoning_package import FILES


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    version = PACKAGE.partition("==")[2]
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    before = set(sys.modules)
    reasoning_tasks._scorer.cache_clear()
    yield
    reasoning_tasks._scorer.cache_clear()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("reasoning_gym", *reasoning_tasks.WITHOUT_WHEEL):
            del sys.modules[name]


def rows_of(query: str) -> list[dict[str, Any]]:
    return list(make_rows(parse_generated(f"reasoning-gym:{query}").request))


def questions(query: str) -> list[str]:
    return [row["user_prompt"] for row in rows_of(query)]


def test_rows_have_different_questions_and_are_the_same_each_time() -> None:
    found = rows_of("sums?size=40&seed=3")
    assert len({row["user_prompt"] for row in found}) == 40
    assert found == rows_of("sums?size=40&seed=3")
    assert found != rows_of("sums?size=40&seed=300")


def test_no_question_is_in_both_splits() -> None:
    """The question 5 of seed 0 is the question 4 of seed 1, so two seeds are not two splits."""
    held_out = {
        q for seed in range(4) for q in questions(f"sums?size=15&seed={seed}&split=held_out")
    }
    trained = {q for seed in range(4) for q in questions(f"sums?size=60&seed={seed}")}
    assert len(held_out) >= 15
    assert held_out & trained == set()
    assert set(questions("sums?size=60")) & set(questions("sums?size=60&seed=1")) != set()


def test_spaces_do_not_make_another_question() -> None:
    text = next(q for q in map(str, range(50)) if is_held_out(f"Add {q}."))
    assert is_held_out(f" Add \n {text}.")


def test_a_task_with_few_questions_says_how_many_it_has() -> None:
    with pytest.raises(
        Unfit, match=r"sums has \d different questions of the split train among 2000"
    ):
        questions("sums?most=2&size=50")


def test_parameters_reach_the_task() -> None:
    query = 'sums?word=Sum&scale=2&signs=["-"]&note=null&is_kind=false&size=5'
    assert all(question.startswith("Sum ") for question in questions(query))


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("sum", "has no task 'sum'; did you mean sums?"),
        ("xyz", "has no task 'xyz'; it has: endless, failing"),
        ("sums?mots=3", "sums has no parameter 'mots'; did you mean most?"),
        ("sums?most=three", 'sums: most must be a whole number, got "three"'),
        ("sums?most=3.0", "sums: most must be a whole number, got 3.0"),
        ("sums?most=true", "sums: most must be a whole number, got true"),
        ("sums?is_kind=1", "sums: is_kind must be true or false, got 1"),
        ("sums?word=1", "sums: word must be a text, got 1"),
        ("sums?signs=x", 'sums: signs must be a list, got "x"; write it like'),
        ("sums?note=5", "sums: note must be a text, got 5"),
        ("sums?most=0", "sums refuses its parameters: most must be at least 1; correct them"),
        ("failing", "failed at its question 0: ZeroDivisionError: division by zero; choose"),
        ("solved", "this task needs the package pycosat, which has no wheel; choose another"),
        ("tuples", "the scorer of tuples gives another score when an entry was stored as JSON"),
        ("sets", "an entry of sets cannot be stored and scored: TypeError: .*'str' and 'set'"),
    ],
)
def test_a_request_that_cannot_be_fulfilled_is_refused(query: str, said: str) -> None:
    with pytest.raises(Unfit, match=said):
        rows_of(query)


def test_a_task_without_one_right_answer_has_no_ground_truth() -> None:
    assert all("ground_truth" not in row for row in rows_of("open?size=4"))
    assert all("ground_truth" in row for row in rows_of("sums?size=4"))


def test_the_packages_own_scorer_scores() -> None:
    (row, *_) = rows_of("sums?size=4")
    assert score(row["ground_truth"], row["metadata"]) == 1.0
    assert score("x", row["metadata"]) == 0.0


def test_an_answer_that_the_scorer_cannot_read_scores_0() -> None:
    (row, *_) = rows_of("sums?size=4")
    assert score("crash", row["metadata"]) == 0.0


def test_a_row_of_another_version_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    (row, *_) = rows_of("sums?size=4")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.1.26")
    with pytest.raises(
        ValueError, match=f'{PACKAGE}, and the rollout has 0.1.26; name "{PACKAGE}"'
    ):
        score("1", row["metadata"])


def test_a_row_of_another_origin_is_not_scored() -> None:
    with pytest.raises(ValueError, match="has no 'reasoning_gym'; use a dataset whose name"):
        score("1", {"a": 1})


def test_the_grader_takes_what_is_marked_as_the_answer() -> None:
    from headrace.graders.generated_tasks import reasoning_gym

    (row, *_) = rows_of("sums?size=4")
    truth, metadata = row["ground_truth"], row["metadata"]
    for text in (
        f" {truth}\n",
        f"<answer>9</answer> no: <answer> {truth} </answer>!",
        f"<answer>{truth}",
    ):
        assert reasoning_gym(text, truth, metadata) == 1.0
    assert reasoning_gym(f"It is {truth}.", None, metadata) == 0.0


def test_the_program_writes_rows_or_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = parse_generated("reasoning-gym:open?size=5").request
    monkeypatch.setattr(sys, "argv", ["-", json.dumps(request)])
    assert reasoning_tasks.main() == 0
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(written) == 5
    monkeypatch.setattr(sys, "argv", ["-", json.dumps(request | {"task": "opn"})])
    assert reasoning_tasks.main() == 1
    assert "did you mean open?" in (tmp_path / "refused.txt").read_text()


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ImportError, match=r"add \"reasoning-gym\" to the dependencies in the pyproject"
    ):
        reasoning_tasks.load_package()


def test_a_task_that_is_made_of_others_is_refused_with_the_reason() -> None:
    with pytest.raises(Unfit, match="composite is made of other tasks, which a name cannot say"):
        rows_of("composite?size=4")
