"""Names: one word per idea, functions are verbs, and a folder is small enough to be read at a glance."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.source import ROOT, ROOTS, modules, nodes, parse, relative

MOST_ROOMS = 20
"""Modules and folders of one folder."""

IRREGULAR = """
sent told held shown given made found lent kept known done gone begun written drawn taken seen said
paid left lost born bound built bought chosen come felt grown heard hidden laid led meant met sold
spent spoken stood taught thought torn thrown understood woken won
"""
"""Participles and past forms that do not end in -ed."""

NOT_PARTICIPLES = {"need", "feed", "seed", "embed", "speed"}
"""A word that begins with un- (`unconsumed`, `unsupported`) is an adjective and may be a name too."""


ACCESS = (
    *("infra/identity/*.py", "producers/cli/commands/access/*.py"),
    *("producers/http/auth.py", "producers/http/browsers.py", "producers/http/routing.py"),
)
"""What decides who may do what."""

TOKEN = re.compile(r"(?<![\w/.\"-])tokens?\b", re.I)
"""The word as a word of its own, and not the file of that name, a former name or a standard function."""


QUESTION = re.compile(
    r"test_(?:twin_)?(?:what|who|whom|whose|which|where|how|when|why|if|whether)(?:ever|soever)?_"
)
"""The name of a test that begins with a question word, where its subject should be."""


FUNCTION = re.compile(r"^[ \t]*(?:async )?def (\w+)", re.M)
CLASS = re.compile(r"^class ([A-Za-z]\w*)", re.M)


def bad_functions(path: Path, is_bad: Callable[[str], object]) -> Iterator[str]:
    """The functions of a module whose names are bad, each with its place. The tree of a module is looked
    at only if a line looks like one: to parse all tests takes seconds."""
    if not any(is_bad(found[1]) for found in FUNCTION.finditer(path.read_text())):
        return
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_bad(node.name):
            yield f"{relative(path)}:{node.lineno} {node.name}"


def has_public_class(path: Path, name: str) -> bool:
    """Whether a module itself defines the class, and not only a text in it."""
    return any(isinstance(n, ast.ClassDef) and n.name == name for n in parse(path).body)


def is_bare_participle(name: str) -> bool:
    """Whether a function's name is one participle: `sent`, `_listed`."""
    word = name.strip("_")
    if word.startswith("un") or word in NOT_PARTICIPLES:
        return False
    regular = word.endswith("ed") and len(word) > 4
    return "_" not in word and (regular or word in IRREGULAR.split())


def test_no_public_class_name_occurs_twice() -> None:
    places: dict[str, list[Path]] = defaultdict(list)
    for path in modules():
        for name in {found[1] for found in CLASS.finditer(path.read_text())}:
            places[name].append(path)
    assert len(places) > 1000
    twice = {
        name: [relative(path) for path in paths if has_public_class(path, name)]
        for name, paths in places.items()
        if len(paths) > 1
    }
    assert {name: paths for name, paths in twice.items() if len(paths) > 1} == {}


def test_no_function_is_named_by_a_bare_participle() -> None:
    assert not [one for path in modules() for one in bad_functions(path, is_bare_participle)]


def test_twin_a_participle_is_recognised() -> None:
    assert all(map(is_bare_participle, ("sent", "_listed", "told", "shaped")))
    assert not any(map(is_bare_participle, ("send", "seed", "is_listed", "listed_runs", "red")))


def test_the_name_of_a_test_begins_with_its_subject() -> None:
    found = [one for path in modules("tests") for one in bad_functions(path, QUESTION.match)]
    assert not found, "name a test with subject, verb and expected result"


def test_twin_a_bad_name_is_found_in_code_and_not_in_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.architecture.test_names.relative", str)
    text = 'TEXT = """\ndef sent(): ...\nclass Same: ...\n"""\n'
    code = "class Same:\n    async def _listed(self) -> None: ...\n"
    for name, content, is_found in (("text", text, False), ("code", code, True)):
        path = tmp_path / f"{name}.py"
        path.write_text(content)
        assert (list(bad_functions(path, is_bare_participle)) != []) is is_found
        assert CLASS.findall(content) == ["Same"]
        assert has_public_class(path, "Same") is is_found


def test_twin_a_question_word_in_place_of_a_subject_is_seen() -> None:
    asked = ("test_what_is_put_is_got", "test_twin_where_it_is_traced_it_ends", "test_whoever_asks")
    assert all(map(QUESTION.match, asked))
    assert not any(map(QUESTION.match, ("test_a_put_object_is_read_back", "test_whole_groups_fit")))


def test_the_credential_of_the_api_is_called_an_api_key() -> None:
    files = [path for pattern in ACCESS for path in sorted(ROOT.glob(pattern))]
    assert len(files) > 10
    found = [
        f"{relative(path)}:{number} {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if TOKEN.search(line)
    ]
    assert not found, "a token is a unit of text; call the credential an API key"


def test_twin_a_credential_that_is_called_a_token_is_seen() -> None:
    assert all(map(TOKEN.search, ("the token expired", "tokens: list[str]", "Tokens of the API")))
    assert not any(map(TOKEN.search, ("$HEADRACE_HOME/token", "secrets.token_hex(4)")))


def test_no_folder_has_more_than_20_rooms() -> None:
    full = {}
    for root in ROOTS:
        for folder in [ROOT / root, *(p for p in (ROOT / root).rglob("*") if p.is_dir())]:
            rooms = {
                p.name
                for p in folder.iterdir()
                if p.suffix == ".py" or (p / "__init__.py").exists()
            }
            if len(rooms - {"__init__.py"}) > MOST_ROOMS:
                full[str(folder.relative_to(ROOT))] = len(rooms)
    assert full == {}
