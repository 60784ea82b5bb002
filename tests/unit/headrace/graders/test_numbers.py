"""The final number of an answer is found, whatever stands around it, and found fast."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.graders import gsm8k
from headrace.graders.numbers import final_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", 18),
        ("#### $1,234", 1234),
        ("#### -7", -7),
        ("#### \u22127 degrees", -7),
        ("5 + 3 = 8", 8),
        ("It takes 10-3 = 7 hours, so 7.", 7),
        ("1,000,000 people", 1_000_000),
        ("1,2 and 3", 3),
        ("costs \u20ac 12.50 in all", Fraction("12.5")),
        ("about .5 l", Fraction(1, 2)),
        ("is 3/4", Fraction(3, 4)),
        (r"\boxed{42} and 7 more words", 42),
        (r"\boxed{12\text{ km}}", 12),
        ("first 3 #### 4 then 5", 4),
        ("50%", 50),
        ("on 2024-07-26", 26),
        ("100,200", 100_200),
    ],
)
def test_the_final_number_is_found(text: str, number: int | Fraction) -> None:
    assert final_number(text) == number


@pytest.mark.parametrize("text", ["", "none", "####", "#### unknown", "7 / 0 is 7/0", "9" * 101])
def test_without_a_number_there_is_none(text: str) -> None:
    assert final_number(text) is None


@given(st.integers(-(10**90), 10**90), st.text(st.characters(categories=["L", "Zs"])))
def test_every_integer_is_found_behind_the_mark(number: int, around: str) -> None:
    assert final_number(f"{around}\n#### {number}\n{around}") == number
    assert final_number(f"{around} #### {number:,} {around}") == number


@given(st.text())
def test_any_text_has_a_number_or_none(text: str) -> None:
    found = final_number(text)
    assert found is None or isinstance(found, Fraction)
    assert gsm8k(text, "#### 3") in (0.0, 1.0)


def test_the_ground_truth_may_be_a_solution() -> None:
    assert gsm8k("so 72", "Natalia sold 48/2 = <<48/2=24>>24.\n#### 72") == 1.0
    assert gsm8k("so 71", "#### 72") == 0.0
    assert gsm8k("I do not know", "#### 72") == 0.0


def test_integers_are_exact_and_decimals_nearly() -> None:
    assert gsm8k("1000001", "1000000") == 0.0
    assert gsm8k("0.3333333", "0.33333333") == 1.0
    assert gsm8k("0.3", "0.33333333") == 0.0


@pytest.mark.parametrize("truth", ["", "  ", None])
def test_a_row_without_ground_truth_is_an_error(truth: str) -> None:
    with pytest.raises(ValueError, match="this row has no ground truth"):
        gsm8k("3", truth)


def test_a_ground_truth_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="'many' holds no number"):
        gsm8k("3", "many")


@pytest.mark.parametrize(
    "text",
    [
        "1" * (1 << 20),
        "1," * (1 << 19),
        "####" * (1 << 18),
        "1/" * (1 << 19),
        "-" * (1 << 20),
        "$ " * (1 << 19) + "1",
        "." * (1 << 20),
        r"\boxed{" * 100_000,
        r"\boxed{" + "{" * (1 << 20),
    ],
)
def test_hostile_answers_take_no_time(text: str) -> None:
    begun = time.process_time()
    gsm8k(text, "18")
    assert time.process_time() - begun < 0.5
