"""Pages, docstrings, comments and messages are plain English: the common slips are found here."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("schemas", "trainer", "infra", "consumers", "producers", "headrace", "bench", "examples")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
SHOWS_THEM = {"CONTRIBUTING.md"}
"""Quotes old forms beside the new ones."""

GENERATED = {"docs/config.md", "docs/events.md", "docs/known_bugs.md"}
"""Their tables are long; their sentences come from the code."""

SLIPS = {
    r"(?<!here )\b(?:is|are|was|were|be) no (?!(?:longer|more|fewer|less|later|way)\b)\w+": "is not a",
    r"^\s*\"\"\"(?:What|Who) (?!.*\?)": "the noun that is meant",
    r"\banew\b": "again",
    r"\bfor ever\b": "permanently, until it is deleted",
    r"\bat hand\b": "available, this",
    r"\bso much\b": "that much, or say how much",
    r"\bstands? in (?!the way|a row|rows)\b": "is in, is written in; or replaces",
    r"\bcan(?:not)? be had\b": "is (not) available",
    r"\bwhoever\b": "name the subject",
    r"\b(?:is|are) told\b": "receives, is given",
    r"\bin its stead\b": "instead",
    r"\bof its own accord\b": "by itself",
    r"\blest\b": "so that ... not",
    r"\bour day\b": "say what happened",
}
"""A pattern that a search must not find -> what to write instead."""


def slips(text: str) -> list[str]:
    """The slips of a text, with what to write instead."""
    found = []
    for pattern, better in SLIPS.items():
        found += [f"{m.group(0)!r}: write {better}" for m in re.finditer(pattern, text)]
    return found


def prose_of_code(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every string and comment of a module."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            yield from enumerate(token.string.split("\n"), token.start[0])


def prose_of_page(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of a page outside of code blocks."""
    fenced = False
    for number, line in enumerate(path.read_text().split("\n"), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def modules() -> list[Path]:
    """The modules of the product and of the examples."""
    return sorted(path for root in ROOTS for path in (ROOT / root).rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", modules(), ids=name)
def test_a_module_is_written_in_plain_english(path: Path) -> None:
    found = [(n, slip) for n, text in prose_of_code(path) for slip in slips(text)]
    assert not found


@pytest.mark.parametrize("path", [p for p in PAGES if p.name not in SHOWS_THEM], ids=name)
def test_a_page_is_written_in_plain_english(path: Path) -> None:
    found = [(n, slip) for n, text in prose_of_page(path) for slip in slips(text)]
    assert not found


@pytest.mark.parametrize("path", [p for p in PAGES if name(p) not in GENERATED], ids=name)
def test_a_page_is_wrapped_at_100(path: Path) -> None:
    long = [
        number
        for number, line in prose_of_page(path)
        if len(line) > 100
        and not line.lstrip().startswith(("|", "#", "[", "!"))
        and not re.search(r"\]\([^)]*\)|`[^`]{60,}`", line)
    ]
    assert not long


def test_every_module_says_what_it_holds() -> None:
    silent = [
        name(path)
        for path in modules()
        if path.name != "__init__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def test_twin_the_old_forms_are_found() -> None:
    old = (
        "a table is no model",
        "it is packed anew for each pass",
        "the machine at hand",
        "whoever asks",
        "a name that cannot be had",
        '    """What a backup holds."""',
    )
    assert all(slips(text) for text in old)
    assert not slips("there is no dataset 'x'; it is not a model, and no longer read")
