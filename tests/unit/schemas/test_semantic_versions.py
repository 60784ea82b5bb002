"""Semantic versions: their form, their order, and the texts that sort as they do."""

import functools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InvalidConfig
from schemas.ids import SemanticVersion

NUMBERS = st.one_of(st.integers(0, 20), st.integers(0, 10**18)).map(str)
WORDS = st.from_regex(r"[0-9A-Za-z-]{0,4}[A-Za-z-][0-9A-Za-z-]{0,3}", fullmatch=True)
VERSIONS = st.builds(
    lambda numbers, rest: ".".join(numbers) + ("-" + ".".join(rest) if rest else ""),
    st.tuples(st.integers(0, 12).map(str), st.integers(0, 12).map(str), NUMBERS),
    st.lists(st.one_of(st.sampled_from(["rc", "a", "1", "11", "2"]), WORDS, NUMBERS), max_size=3),
).filter(lambda text: len(text) <= 64)

ORDERED = (
    *("0.0.1", "0.9.0", "0.10.0", "1.0.0-0", "1.0.0-2", "1.0.0-10", "1.0.0--", "1.0.0-alpha"),
    *("1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta", "1.0.0-beta.2", "1.0.0-beta.11"),
    *("1.0.0-rc.1", "1.0.0", "1.0.1-a", "1.0.1", "1.2.0", "1.10.0", "2.0.0", "10.0.0"),
)


def compared(a: str, b: str) -> int:
    """The rule of semver.org, section 11, as it is written there."""

    def parts(text: str) -> tuple[list[int], list[str]]:
        core, _, rest = text.partition("-")
        return [int(one) for one in core.split(".")], rest.split(".") if rest else []

    (core_a, rest_a), (core_b, rest_b) = parts(a), parts(b)
    if core_a != core_b:
        return -1 if core_a < core_b else 1
    if not rest_a or not rest_b:
        return bool(rest_b) - bool(rest_a)
    for one, other in zip(rest_a, rest_b, strict=False):
        if one == other:
            continue
        if one.isdigit() and other.isdigit():
            return -1 if int(one) < int(other) else 1
        if one.isdigit() != other.isdigit():
            return -1 if one.isdigit() else 1
        return -1 if one < other else 1
    return (len(rest_a) > len(rest_b)) - (len(rest_a) < len(rest_b))


def test_the_texts_sort_as_the_versions_of_the_standard() -> None:
    assert tuple(sorted(ORDERED, key=lambda one: SemanticVersion.parse(one).precedence)) == ORDERED
    assert tuple(sorted(ORDERED, key=functools.cmp_to_key(compared))) == ORDERED


@given(VERSIONS, VERSIONS)
def test_the_text_of_a_version_compares_as_the_rule_says(a: str, b: str) -> None:
    first, second = (SemanticVersion.parse(one).precedence for one in (a, b))
    assert (first > second) - (first < second) == compared(a, b)
    assert str(SemanticVersion.parse(a)) == a


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", "1.0", "1.0.0.0", "01.0.0", "1.0.0-", "1.0.0-01", "1.0.0-a..b", "1.0.0+x"),
        *("v1.0.0", "1.0.0\n", " 1.0.0", "1.0.0-é", "1.0.٣", "1.0.0-" + "a" * 64, "latest", "-1"),
    ],
)
def test_other_texts_are_not_versions(text: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape("like 1.2.0 or 2.0.0-rc.1")):
        SemanticVersion.parse(text)
