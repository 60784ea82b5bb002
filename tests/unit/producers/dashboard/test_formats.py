"""How values look on a page."""

import pytest

from producers.dashboard.formats import FILTERS, duration, number, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one\r\ntwo\nthree", "one\ntwo\nthree"),
        ("done\rgone", "done\N{REPLACEMENT CHARACTER}gone"),
        ("\x1b[31mred", "\N{REPLACEMENT CHARACTER}[31mred"),
        ("\u202egpj", "\N{LEFT-POINTING ANGLE BRACKET}U+202E\N{RIGHT-POINTING ANGLE BRACKET}gpj"),
        ("\ud800", "?"),
    ],
)
def test_signs_that_cannot_be_seen_are_shown(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_a_long_text_says_how_much_is_left() -> None:
    assert plain("x" * 12, 10) == "x" * 10 + "… (2 more characters)"


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0.0 s"), (75, "1 min 15 s"), (3600, "1 h")])
def test_a_duration_has_its_two_largest_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1e-9, "0"), (-3.7e-9, "0"), (2e-8, "2e-08"), (0.0, "0"), (0.25, "0.25"), (None, "—")],
)
def test_noise_is_shown_as_0(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_a_model_is_shown_by_the_last_part_of_its_path() -> None:
    assert FILTERS["model"]("/models/SmolLM2.gguf") == "SmolLM2.gguf"
    assert FILTERS["model"](None) == "None"
