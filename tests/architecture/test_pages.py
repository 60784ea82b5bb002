"""The pages that people act on agree with the code: promises, commands, messages, metrics."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from producers.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
PROMISES = ROOT / "docs" / "guarantees.md"
RUNBOOK = ROOT / "docs" / "runbook.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SAID_BY = ("infra", "consumers", "producers", "schemas", "trainer")
SHORTEST = 8
"""Shorter pieces of a message (between what varies) prove nothing."""


def functions(path: Path) -> set[str]:
    """Names of the tests of a file; those in classes too."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`(tests/[^`]+)`", PROMISES.read_text()))))
def test_a_promise_names_a_test_that_exists_or_it_is_only_a_wish(named: str) -> None:
    file, _, function = named.partition("::")
    path = ROOT / file
    assert path.exists()
    if function:
        assert function in functions(path)


def test_every_promise_has_a_test_and_says_what_it_does_not_promise() -> None:
    parts = re.split(r"^## (G\d+)\b", PROMISES.read_text(), flags=re.M)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(sections) == [f"G{n}" for n in range(1, 14)]
    for name, section in sections.items():
        assert "**Not promised.**" in section, name
        if "**Not built yet.**" not in section:
            assert re.search(r"`tests/[^`]+`", section), name
            assert "**How.**" in section, name


def test_the_index_leads_to_every_page_and_nowhere_else() -> None:
    index = ROOT / "docs" / "README.md"
    links = [
        (index.parent / link).resolve()
        for link in re.findall(r"\]\(([^)#]+)\)", index.read_text())
        if "://" not in link
    ]
    assert [link for link in links if not link.exists()] == []
    pages = {path.resolve() for path in (ROOT / "docs").rglob("*.md")} - {index.resolve()}
    assert pages - set(links) == set()


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) of each `headrace ...` in code: between backticks, or a line of a block."""
    for path in PAGES:
        text = path.read_text()
        blocks = "\n".join(re.findall(r"^```[a-z]*\n(.*?)^```", text, re.M | re.S))
        spans = re.findall(
            r"`(headrace [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        )
        lines = re.findall(r"^(headrace [^#&\n]+)", blocks, re.M)
        for said in dict.fromkeys(" ".join(command.split()) for command in (*spans, *lines)):
            yield path.name, said


@pytest.mark.parametrize(("page", "said"), list(commands()))
def test_pages_name_commands_that_there_are_or_people_are_left_alone(page: str, said: str) -> None:
    command: click.Command = cli
    words = said.split()[1:]
    while words and isinstance(command, click.Group):
        if words[0].startswith("-"):
            break
        word = words.pop(0)
        found = command.get_command(click.Context(command), word)
        assert found is not None, f"{page}: {said}"
        command = found
    options = {name for parameter in command.params for name in parameter.opts}
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    assert given <= options | {"--help", "--json"}, f"{page}: {said}"


@cache
def texts() -> str:
    """Every string that our code holds; what varies in it is cut out."""
    found = []
    for root in SAID_BY:
        for path in sorted((ROOT / root).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(" ".join(node.value.split()))
    return "\n".join(found)


def quoted() -> list[str]:
    """The pieces of messages that the runbook quotes."""
    messages = re.findall(r"“([^”]+)”", RUNBOOK.read_text())
    pieces = [" ".join(piece.split()).strip(" .:;,") for m in messages for piece in m.split("…")]
    return sorted({piece for piece in pieces if len(piece) >= SHORTEST})


@pytest.mark.parametrize("piece", quoted())
def test_the_runbook_quotes_what_the_code_says_or_nobody_finds_the_page(piece: str) -> None:
    assert piece in texts()


def test_the_runbook_watches_metrics_that_there_are() -> None:
    named = set(re.findall(r"`(headrace_[a-z_]+)`", RUNBOOK.read_text()))
    assert named
    assert named <= set(re.findall(r"headrace_[a-z_]+", texts()))


def test_every_incident_says_what_is_seen_why_what_to_do_and_what_not() -> None:
    parts = re.split(r"^## (\d+)\. ", RUNBOOK.read_text(), flags=re.M)[1:]
    incidents = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(incidents) == [str(n) for n in range(1, len(incidents) + 1)]
    assert len(incidents) >= 10
    for number, incident in incidents.items():
        for word in ("**Seen.**", "**Why.**", "**Do.**", "**Not.**"):
            assert word in incident, number
