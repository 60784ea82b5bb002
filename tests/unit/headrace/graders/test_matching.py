"""Answers that equal the ground truth, exactly or after normalising."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.graders import exact_match, normalized_match
from headrace.graders.matching import normalize


@pytest.mark.parametrize(
    ("answer", "truth", "exact", "normalized"),
    [
        ("Paris", "Paris", 1.0, 1.0),
        ("\tParis \n", "Paris", 1.0, 1.0),
        ("paris.", "Paris", 0.0, 1.0),
        ("The Eiffel-Tower", "eiffel tower", 0.0, 1.0),
        ("\uff30aris", "Paris", 0.0, 1.0),
        ("Stra\u00dfe", "STRASSE", 0.0, 1.0),
        ("London", "Paris", 0.0, 0.0),
        ("?", "!", 0.0, 0.0),
        ("a", "the", 0.0, 0.0),
    ],
)
def test_both_matches(answer: str, truth: str, exact: float, normalized: float) -> None:
    assert exact_match(answer, truth) == exact
    assert normalized_match(answer, truth) == normalized


@given(st.text())
def test_normalising_twice_is_normalising_once(text: str) -> None:
    once = normalize(text)
    assert normalize(once) == once
    assert bool(once) == bool(text.strip()) or not text.isprintable()


@given(st.text(min_size=1).filter(str.strip))
def test_every_text_matches_itself(text: str) -> None:
    assert exact_match(text, text) == 1.0
    assert normalized_match(f"  {text}\n", text) == 1.0


def test_a_row_without_ground_truth_is_an_error() -> None:
    with pytest.raises(ValueError, match="add the column ground_truth"):
        exact_match("x", "")


def test_a_large_answer_takes_no_time() -> None:
    begun = time.process_time()
    assert normalized_match("a! " * 300_000, "b") == 0.0
    assert time.process_time() - begun < 2
