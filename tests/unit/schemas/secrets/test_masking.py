"""A masked text holds no form of a secret, wherever the text was cut into pieces."""

import base64
import html
import itertools
import json
import urllib.parse
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.secrets.masking import FRAGMENT, NO_MASKS, STRIDE, Masks, forms_of, mask_of

VALUE = "sk-läng&\"geheim\\ '42/+="
MASK = "***KEY***"

texts = st.text(alphabet='ab01"\\/%+=\n é', max_size=60)
values = st.text(alphabet='ab01"\\/%+=é', min_size=8, max_size=20).filter(
    lambda value: len(value.strip()) >= 8
)


def masks(value: str = VALUE) -> Masks:
    return Masks({"KEY": value})


FORMS: list[Callable[[str], str]] = [
    str,
    lambda v: base64.b64encode(v.encode()).decode(),
    lambda v: base64.b64encode(v.encode() + b"\n").decode(),
    lambda v: base64.urlsafe_b64encode(v.encode()).decode(),
    lambda v: base64.b64encode(v.encode()).decode().rstrip("="),
    lambda v: v.encode().hex(),
    lambda v: v.encode().hex().upper(),
    urllib.parse.quote,
    urllib.parse.quote_plus,
    lambda v: urllib.parse.quote(v, safe=""),
    lambda v: urllib.parse.urlencode({"q": v}),
    json.dumps,
    lambda v: json.dumps(v, ensure_ascii=False),
    lambda v: json.dumps(json.dumps({"a": v})),
    repr,
    lambda v: repr(v.encode()),
    lambda v: repr({"KEY": v}),
    html.escape,
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_masked(form: Callable[[str], str]) -> None:
    shown = masks().text(f"before {form(VALUE)} after")
    assert mask_of("KEY") in shown
    assert shown.startswith("before ")
    assert shown.endswith(" after")
    assert "geheim" not in shown
    assert not any(one in shown for one in forms_of(VALUE))
    assert "geheim" in NO_MASKS.text(f"{VALUE}"), "the twin: without masks it is there"


@pytest.mark.parametrize("offset", range(3))
@pytest.mark.parametrize("after", ["", "x", "yz"])
def test_a_value_inside_of_a_longer_base64_is_masked(offset: int, after: str) -> None:
    encoded = base64.b64encode(f"{'u' * offset}{VALUE}{after}".encode()).decode()
    shown = masks().text(encoded)
    assert MASK in shown
    assert len(shown) - len(MASK) <= 10, "only characters at the borders stay"


def test_a_value_of_several_lines_is_masked_line_by_line() -> None:
    key = "-----BEGIN KEY-----\nabcdefghijkl\nmnop\n-----END KEY-----\n"
    assert masks(key).text("line: abcdefghijkl.") == f"line: {MASK}."
    assert masks(key).text(key).strip() == MASK


def test_overlapping_values_are_masked_completely() -> None:
    both = Masks({"A": "abcdefgh1234", "B": "1234ijklmnop"})
    assert both.text("<abcdefgh1234ijklmnop>") in ("<***A***>", "<***B***>")


def test_the_longest_value_names_the_mask() -> None:
    both = Masks({"SHORT": "abcdefgh", "LONG": "xxabcdefghxx"})
    assert both.text("xxabcdefghxx abcdefgh") == "***LONG*** ***SHORT***"


def test_a_text_that_was_cut_shows_no_long_part_of_a_value() -> None:
    value = "0123456789abcdefghijklmnopqrstuvwxyz"
    for cut in range(FRAGMENT, len(value)):
        for part in (value[:cut], value[-cut:], f"tail: {value[-cut:]} and more"):
            assert not any(
                value[i : i + FRAGMENT] in masks(value).cut_text(part)
                for i in range(len(value) - FRAGMENT + 1)
            )
    assert value[:20] in masks(value).text(value[:20]), "the twin: a whole value is looked for"


@given(st.lists(st.one_of(texts, values), max_size=8), values)
def test_no_form_is_left_between_the_masks(parts: list[str], value: str) -> None:
    shown = masks(value).text(value.join(parts))
    for piece in shown.split(MASK):
        assert not any(form in piece for form in forms_of(value))


@given(texts, values)
def test_a_text_without_the_value_stays(text: str, value: str) -> None:
    if not any(form in text for form in forms_of(value)):
        assert masks(value).text(text) == text


@given(st.lists(texts, max_size=6), values, st.lists(st.integers(0, 400), max_size=6))
def test_a_stream_is_masked_as_its_whole_text(
    parts: list[str], value: str, cuts: list[int]
) -> None:
    whole = value.join(parts)
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    stream = masks(value).stream()
    pieces = [whole[a:b] for a, b in itertools.pairwise(places)]
    shown = "".join(stream.feed(piece) for piece in pieces) + stream.finish()
    assert shown == masks(value).text(whole)


def test_a_part_of_a_long_value_is_masked_too() -> None:
    value = "".join(f"{number:04d}-" for number in range(400))
    for first in range(40):
        part = value[first : first + 60]
        assert len(masks(value).cut_text(part).replace(MASK, "")) < 2 * STRIDE
