"""Pages, docstrings, comments and messages are plain English: the common slips are found here."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.kit import source
from tests.kit.source import ROOT, parse, relative

ROOTS = (*source.ROOTS, "bench", "examples")
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

ANY_SLIP = re.compile("|".join(SLIPS))
"""One search in place of one for each pattern: most lines have no slip."""


def slips(text: str) -> list[str]:
    """The slips of a text, with what to write instead."""
    if not ANY_SLIP.search(text):
        return []
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


def test_modules_are_written_in_plain_english() -> None:
    found = [
        f"{relative(path)}:{number} {slip}"
        for path in source.modules(*ROOTS)
        for number, text in prose_of_code(path)
        for slip in slips(text)
    ]
    assert not found


def test_pages_are_written_in_plain_english() -> None:
    found = [
        f"{relative(path)}:{number} {slip}"
        for path in PAGES
        if path.name not in SHOWS_THEM
        for number, text in prose_of_page(path)
        for slip in slips(text)
    ]
    assert not found


def test_pages_are_wrapped_at_100() -> None:
    long = [
        f"{relative(path)}:{number}"
        for path in PAGES
        if relative(path) not in GENERATED
        for number, line in prose_of_page(path)
        if len(line) > 100
        and not line.lstrip().startswith(("|", "#", "[", "!"))
        and not re.search(r"\]\([^)]*\)|`[^`]{60,}`", line)
    ]
    assert not long


def test_every_module_says_what_it_holds() -> None:
    silent = [
        relative(path)
        for path in source.modules(*ROOTS)
        if path.name != "__init__.py" and not ast.get_docstring(parse(path))
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
