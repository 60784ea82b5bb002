"""The pages that people act on agree with the code: promises, files, commands, messages, metrics."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from producers.cli.main import cli
from tests.kit.source import ROOT, modules, nodes, relative

PROMISES = ROOT / "docs" / "guarantees.md"
SECURITY = ROOT / "docs" / "security.md"
RUNBOOK = ROOT / "docs" / "runbook.md"
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
)
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
SECTIONS = (
    "Question",
    "Decision",
    "Reasons",
    "Alternatives",
    "Consequences",
    "What would change it",
)
SAID_BY = ("infra", "consumers", "producers", "schemas", "trainer")
SHORTEST = 8
"""Shorter pieces of a message (between what varies) prove nothing."""


def functions(path: Path) -> set[str]:
    """Names of the tests of a file; those in classes too."""
    return {
        node.name
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


NAMED_TESTS = {
    name
    for page in (PROMISES, SECURITY)
    for name in re.findall(r"`(tests/[^`]+)`", page.read_text())
}


def test_a_promise_names_a_test_that_exists_or_it_is_only_a_wish() -> None:
    missing = []
    for named in sorted(NAMED_TESTS):
        file, _, test = named.partition("::")
        function, _, parameter = test.removesuffix("]").partition("[")
        path = ROOT / file
        is_there = path.exists() and (not function or function in functions(path))
        if not is_there or (parameter and f'"{parameter}"' not in path.read_text()):
            missing.append(named)
    assert missing == []


def test_every_promise_has_a_test_and_says_what_it_does_not_promise() -> None:
    parts = re.split(r"^## (G\d+)\b", PROMISES.read_text(), flags=re.M)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(sections) == [f"G{n}" for n in range(1, 15)]
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


def test_decisions_are_numbered_without_holes_and_have_short_names() -> None:
    titles = [re.match(r"# (\d+)\. [A-Z]", path.read_text()) for path in DECISIONS]
    numbers = [int(title.group(1)) for title in titles if title]
    assert numbers == [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(titles) + 1))
    assert [path.name for path in DECISIONS if path.stem.count("-") > 6] == []


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.name[:4])
def test_a_decision_has_the_sections_of_all_others_in_their_order(path: Path) -> None:
    text = path.read_text()
    found = re.findall(r"^## (.+)$", text, re.M)
    assert re.match(r"# .+\n\n\*\*Status:\*\* \w+\.\n\n## ", text)
    assert found == [name for name in SECTIONS if name in found]
    assert set(SECTIONS) - set(found) <= {"Reasons", "Consequences"}


@cache
def code_of(path: Path) -> list[str]:
    """The code of a page: the text between backticks, and the lines of its blocks."""
    text = path.read_text()
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.M | re.S)
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines()]
    return [" ".join(said.split()) for said in (*spans, *lines)]


def test_files_that_a_page_names_exist_or_people_look_for_them() -> None:
    places = {path.name for path in ROOT.iterdir() if path.is_dir()}
    missing = []
    for page in PAGES:
        words = {word.split("::")[0] for said in code_of(page) for word in said.split()}
        named = {w for w in words if re.fullmatch(r"[a-z.]+/[\w./-]+", w) and "NAME" not in w}
        ours = {word for word in named if word.split("/")[0] in places and "NNNN" not in word}
        missing += [
            f"{relative(page)}: {word}"
            for word in sorted(ours)
            if not (ROOT / word).exists() and not (page.parent / word).exists()
        ]
    assert missing == []


def test_links_of_pages_lead_somewhere() -> None:
    dead = [
        f"{relative(page)}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert dead == []


def test_links_to_a_section_lead_to_one() -> None:
    dead = [
        f"{relative(page)}: {link}#{section}"
        for page in PAGES
        for link, section in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
        if (target := page.parent / link if link else page).suffix == ".md"
        and section not in sections_of(target)
    ]
    assert dead == []


@cache
def sections_of(page: Path) -> frozenset[str]:
    """The names that GitHub gives to the headings of a page: small letters, and no punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", one).lower().replace(" ", "-") for one in headings)


def test_twin_a_heading_has_the_name_that_github_gives_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# B11's `headrace` learning, of a *model*\n")
    assert sections_of(page) == {"b11s-headrace-learning-of-a-model"}


def test_targets_of_make_and_programs_that_a_page_names_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for said in code_of(page):
            where = f"{relative(page)}: {said}"
            if target := re.match(r"make ([a-z0-9-]+)", said):
                assert target.group(1) in targets, where
            module = re.search(r"python3? -m ([a-z_0-9.]+)", said)
            if module and (ROOT / module.group(1).split(".")[0]).is_dir():
                path = ROOT / module.group(1).replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), where


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) of each `headrace ...` in code."""
    for path in PAGES:
        for said in dict.fromkeys(code_of(path)):
            found = re.match(r"headrace [^&]+", said)
            if found:
                yield relative(path), found.group()


def test_pages_name_commands_that_there_are_or_people_are_left_alone() -> None:
    named = list(commands())
    assert len(named) > 200
    for page, said in named:
        check_command(page, said)


def helps(command: click.Command) -> Iterator[tuple[str, str]]:
    """(command, command that its help names) of a command and of all below it."""
    told = " ".join((command.help or "").split())
    yield from ((str(command.name), said) for said in re.findall(r"`(headrace [^`]+)`", told))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from helps(found)


def test_help_texts_name_commands_that_there_are() -> None:
    named = list(helps(cli))
    assert len(named) > 3
    for name, said in named:
        check_command(f"--help of {name}", said)


def check_command(page: str, said: str) -> None:
    """Fails when the command line lacks the command, or one of its options."""
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
    for path in modules(*SAID_BY):
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(" ".join(node.value.split()))
    return "\n".join(found)


def quoted() -> list[str]:
    """The pieces of messages that the runbook quotes."""
    messages = re.findall(r"“([^”]+)”", RUNBOOK.read_text())
    pieces = [" ".join(piece.split()).strip(" .:;,") for m in messages for piece in m.split("…")]
    return sorted({piece for piece in pieces if len(piece) >= SHORTEST})


def test_the_runbook_quotes_what_the_code_says_or_nobody_finds_the_page() -> None:
    pieces = quoted()
    assert len(pieces) > 20
    assert [piece for piece in pieces if piece not in texts()] == []


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
