"""The letter that an answer chooses."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.graders import multiple_choice
from headrace.graders.choices import chosen_letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(b)", "B"),
        ("C.", "C"),
        ("The answer is (D).", "D"),
        ("Answer: **A**", "A"),
        ("A looks good, but the correct option is B", "B"),
        ("Not (A). It is (C)", "C"),
        (r"Thus \boxed{D}", "D"),
        (r"Thus \boxed{\text{b}}", "B"),
        ("I think it is E, a letter", "E"),
        ("A triangle has three sides, so C", "C"),
        ("the answer: option d", "D"),
        ("", None),
        ("I do not know it", None),
        ("a b c", None),
        ("The answer is unclear", None),
        ("Z", None),
        ("The answer is a triangle. Option I", "I"),
    ],
)
def test_the_letter_is_found(text: str, letter: str | None) -> None:
    assert chosen_letter(text, "ABCDEFGHIJ") == letter


@pytest.mark.parametrize("truth", ["B", "b", "(B)", "B.", "B. Paris", "B) Paris", "**B**"])
def test_the_ground_truth_has_several_forms(truth: str) -> None:
    assert multiple_choice("The answer is B.", truth) == 1.0
    assert multiple_choice("The answer is C.", truth) == 0.0


def test_the_ground_truth_may_be_the_text_of_an_option() -> None:
    row: dict[str, object] = {"choices": ["red", "green"]}
    assert multiple_choice("B", "green", row) == 1.0
    assert multiple_choice("C", "green", row) == 0.0


def test_a_ground_truth_that_is_no_letter_is_an_error() -> None:
    with pytest.raises(ValueError, match="'Paris' is none of the letters A to J"):
        multiple_choice("B", "Paris")


@given(st.text(), st.sampled_from("ABCD"))
def test_a_last_sentence_decides(text: str, letter: str) -> None:
    assert multiple_choice(f"{text}\nThe answer is ({letter}).", letter) == float(
        "\\boxed{" not in text or chosen_letter(text, "ABCDEFGHIJ") in (None, letter)
    )


@pytest.mark.parametrize(
    "text", ["answer " * 150_000, "answer" + " " * (1 << 20), "(" * (1 << 20), "A " * (1 << 19)]
)
def test_hostile_answers_take_no_time(text: str) -> None:
    begun = time.process_time()
    multiple_choice(text, "B")
    assert time.process_time() - begun < 0.5
