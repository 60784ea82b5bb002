"""Globs select names, and no pattern makes a match slow."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.toml.globs import glob_problem, is_selected


@pytest.mark.parametrize(
    ("pattern", "name", "selected"),
    [
        ("main", "main", True),
        ("main", "Main", False),
        ("main", "main/x", False),
        ("release-*", "release-1.2", True),
        ("release-*", "release-1/2", False),
        ("*", "a/b", False),
        ("**", "a/b", True),
        ("rollouts/**", "rollouts/a/main.py", True),
        ("rollouts/**", "rollouts", True),
        ("rollouts/**/*.py", "rollouts/main.py", True),
        ("rollouts/**/*.py", "rollouts/a/b/main.py", True),
        ("rollouts/**/*.py", "rollouts/a/b/main.pyc", False),
        ("**/main.py", "main.py", True),
        ("**/a/**/b", "x/a/a/y/b", True),
        ("**/a/**/b", "x/b/a", False),
        ("v?.[0-9]", "v1.2", True),
        ("v?.[!0-9]", "v1.2", False),
        ("v[", "v[", True),
        ("a.b", "axb", False),
    ],
)
def test_a_glob_matches_whole_names(pattern: str, name: str, selected: bool) -> None:
    assert is_selected(name, (pattern,)) is selected


@pytest.mark.parametrize(
    ("patterns", "name", "selected"),
    [
        (("main", "!main"), "main", False),
        (("!main", "main"), "main", True),
        (("**", "!docs/**", "docs/api.md"), "docs/api.md", True),
        (("**", "!docs/**", "docs/api.md"), "docs/b.md", False),
        (("!docs/**",), "src/x", True),
        (("!docs/**",), "docs/x", False),
        (("!docs/**", "src/**"), "other", False),
    ],
)
def test_the_last_pattern_that_matches_decides(
    patterns: tuple[str, ...], name: str, selected: bool
) -> None:
    assert is_selected(name, patterns) is selected


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("", "must be a pattern"),
        ("!", "must be a pattern"),
        ("/a", "must not begin with /"),
        ("a//b", "two slashes"),
        ("a/", "must not end with /"),
        ("a**", "only alone between slashes"),
        ("refs/heads/main", "write main"),
        ("a\0", "control characters"),
        ("x" * 201, "at most 200"),
    ],
)
def test_a_pattern_that_is_not_a_glob_is_refused(pattern: str, says: str) -> None:
    assert says in (glob_problem(pattern) or "")


def test_a_hostile_pattern_is_not_slow() -> None:
    began = time.process_time()
    assert not is_selected("a" * 4000, ("*a" * 90 + "b",))
    assert not is_selected("a/" * 1000 + "a", ("**/a/" * 39 + "b",))
    assert time.process_time() - began < 1.0, "the time of a match must not explode"


def test_the_twin_a_plain_regular_expression_is_slow() -> None:
    """Fails to be slow only if the pattern above is not hostile."""
    began = time.process_time()
    assert re.fullmatch(".*a" * 5 + "b", "a" * 100) is None
    assert time.process_time() - began > 0.05


PARTS = st.lists(st.sampled_from(["**", "*", "a", "b", "a*", "?", "[ab]"]), min_size=1, max_size=6)
NAMES = st.lists(st.sampled_from(["a", "b", "ab", "c"]), min_size=1, max_size=6)


@given(PARTS, NAMES)
def test_a_match_is_what_trying_every_split_finds(parts: list[str], name: list[str]) -> None:
    def matches(left: list[str], rest: list[str]) -> bool:
        if not left:
            return not rest
        if left[0] == "**":
            return any(matches(left[1:], rest[i:]) for i in range(len(rest) + 1))
        return bool(rest) and is_selected(rest[0], (left[0],)) and matches(left[1:], rest[1:])

    assert is_selected("/".join(name), ("/".join(parts),)) is matches(parts, name)


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_is_a_glob_or_is_refused(pattern: str, name: str) -> None:
    if glob_problem(pattern) is None:
        is_selected(name, (pattern,))
