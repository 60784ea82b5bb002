"""The form of error texts: plain words, and what is wrong, with the value, then what to do."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.kit.source import modules, nodes, parse, relative

ROOT_ERRORS = {"HeadraceError", "BadSetting", "BadValue", "BadMessages"} | {
    "UsageError",
    "BadParameter",
    "ClickException",
}
"""The roots of the errors whose message a user reads; classes that derive from them count too."""

MESSAGE_IS_SECOND = {"Issue", "Failure", "UserCodeError", "BadValue", "_invalid_field"} | {
    "file_issue",
    "line_issue",
}
"""Errors that take a key, a code or a place before the message."""

HELPERS = {"_invalid_mapping", "_invalid_field", "Issue", "file_issue", "line_issue"}
"""Other makers of messages."""

NAMES = {
    "Docker",
    "Git",
    "Grader",
    "Headrace",
    "Kafka",
    "Parquet",
    "Postgres",
    "Python",
    "Idempotency",
}
"""Names that a message may begin with."""

TURNS = (
    r"(?<!there )\b(?:is|are|was|were|be) no (?!longer\b|more than\b|fewer\b|less\b|later\b)[a-z]+",
    r"\banew\b",
    r"\bfor ever\b",
    r"\bat hand\b",
    r"\bso much\b",
    r"\bstands? (?:in|for)\b",
    r"\bca(?:n|nnot) be had\b",
    r"\bnot our day\b",
    r"\bwhoever\b",
    r"\bwhence\b",
    r"\bthereof\b",
    r"\bits stead\b",
    r"\blest\b",
    r"\bsave for\b",
    r"\bbeside it(?:self)?\b",
    r"\b(?:is|are|was|were) told\b",
    r"\blooks? into\b",
    r"\bis paid\b",
    r"\bpleased?\b",
    r"\bsorry\b",
)
"""Turns of phrase that plain English does not use."""


def error_names() -> set[str]:
    """The names of what makes an error for a user."""
    found, bases = set(ROOT_ERRORS), []
    for path in modules():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                bases.append(
                    (node.name, {getattr(b, "id", getattr(b, "attr", "")) for b in node.bases})
                )
    while more := {name for name, of in bases if of & found} - found:
        found |= more
    return found | HELPERS


def text_of(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> str | None:
    """The literal text of an expression, `X` for each value in it; None where it is not literal."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left, names), text_of(node.right, names)
        return f"{left or 'X'}{right or 'X'}" if left or right else None
    if isinstance(node, ast.Name) and node.id in names and depth < 3:
        return text_of(names[node.id], names, depth + 1)
    return None


def messages(path: Path, errors: set[str]) -> Iterator[tuple[str, str]]:
    """(place, message) of every literal message of an error in a file."""
    constants = dict(assignments(parse(path).body))
    for function in nodes(path):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        inside = list(ast.walk(function))
        names = {**constants, **dict(assignments(inside))}
        for node in inside:
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
                at = 1 if name in MESSAGE_IS_SECOND else 0
                if name in errors and len(node.args) > at:
                    text = text_of(node.args[at], names)
                    if text is not None:
                        yield f"{relative(path)}:{node.lineno}", text


def assignments(of: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for node in of:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def faults(text: str) -> Iterator[str]:
    """The slips of a message."""
    first = re.split(r"[\s:,;'-]", text, maxsplit=1)[0]
    if first[:1].isupper() and first[1:].islower() and first not in NAMES:
        yield "begins with a capital"
    if text.rstrip().endswith(".") and not text.rstrip().endswith("..."):
        yield "ends with a period"
    for turn in TURNS:
        if found := re.search(turn, text, re.IGNORECASE):
            yield f"says {found[0]!r}"


def test_messages_of_errors_are_plain() -> None:
    found, total, errors = [], set(), error_names()
    for path in modules():
        for place, text in messages(path, errors):
            total.add((place, text))
            found += [f"{place} {fault}: {text}" for fault in faults(text)]
    assert {"InvalidConfig", "Failure", "StoreAway"} <= errors
    assert len(total) > 300, "the search for messages finds too few of them"
    assert not found, "\n".join(sorted(set(found)))


def test_twin_the_rules_find_what_is_not_plain() -> None:
    for text in (
        "Please set it",
        "there it ends.",
        "'x' is no checkpoint",
        "the token cannot be had",
        "Run it anew",
    ):
        assert list(faults(text)), text
