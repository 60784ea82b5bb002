"""Measured figures name the command that repeats them, and the command exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.source import ROOT

BENCHMARKS = ROOT / "docs" / "benchmarks.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))

COMMAND = re.compile(
    r"`(?:\w+=\S+ )*(?:python -m bench\.(\w+)|python bench/(\w+)\.py|make ([a-z][a-z-]*)\b)"
)
MEASURED = re.compile(
    r"\d[^.]*\b(?:at the median|percentile)\b|\(p9[59]\)|\d[^.]*\bcores\b[^.]*\btook\b"
)
REPEATED = re.compile(
    r"`(?:\w+=\S+ )*(?:make|python|pytest|headrace) |\(benchmarks\.md|benchmarks\.md\)"
)


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """The benches and targets that a text names, and whether each of them exists."""
    for found in COMMAND.finditer(text):
        module, script, target = found.groups()
        bench = module or script
        exists = (ROOT / "bench" / f"{bench}.py").exists() if bench else target in TARGETS
        yield found[0], exists


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_benches_and_targets_that_exist(page: Path) -> None:
    assert [command for command, exists in commands(page.read_text()) if not exists] == []


def test_each_section_of_the_benchmarks_names_its_command() -> None:
    _, *sections = re.split(r"^## ", BENCHMARKS.read_text(), flags=re.M)
    assert len(sections) > 10
    silent = [text.splitlines()[0] for text in sections if not any(commands(text))]
    assert silent == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_paragraph_with_measured_figures_names_its_command(page: Path) -> None:
    if page == BENCHMARKS or page.parent.name == "decisions":
        return  # a section has one command there, and a decision records its day
    paragraphs = re.split(r"\n\s*\n", page.read_text())
    unrepeated = [p for p in paragraphs if MEASURED.search(p) and not REPEATED.search(p)]
    assert unrepeated == []
