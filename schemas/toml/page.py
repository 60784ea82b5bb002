"""The keys of the TOMLs as a page: `python -m schemas.toml.page docs/config.md` writes it.

It is derived from `schemas/config.py` and what it imports, and from `schemas/toml/triggers.py`.
tests/golden/test_documents.py fails when it is out of date.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from schemas import config, datasets
from schemas.algorithms import READ_BY
from schemas.config import (
    Advanced,
    EvalConfig,
    FailedRewards,
    RewardWeight,
    RubricWeight,
    RunConfig,
    Section,
)
from schemas.costs import budget
from schemas.datasets import Curriculum
from schemas.models import reward_model
from schemas.models.reward_model import RewardModelTable
from schemas.toml import mcp_tables, triggers
from schemas.toml.mcp_tables import McpTable
from schemas.toml.triggers import Trigger, WorkspaceTable

BY_ALGORITHM = "by algorithm"
NUMBERS = {int: "whole number", float: "number"}
BOUNDS = {"ge": "from", "gt": "above", "le": "up to", "lt": "below"}

HEAD = """\
# Config

This page lists every key of the TOML files that `headrace train submit` and `headrace eval submit`
read, and of `headrace.toml`. It is generated from `schemas/config.py` and
`schemas/toml/triggers.py` by `python -m schemas.toml.page docs/config.md`.

A TOML is checked strictly when it is submitted. An unknown section or key, a value out of bounds,
and a key that the run would not read are errors. Each error says what to change. Unknown keys and
values out of bounds are reported first, together, and all other errors together after them.
`producers/core/validation/validate.py` lists where each check is made.

`headrace workspace init` creates a workspace with example `configs/`. Where the default is
*by algorithm*, see [algorithms](algorithms.md#keys-and-defaults).
"""


TABLES: dict[str, type[BaseModel]] = {
    "[advanced.curriculum]": Curriculum,
    "[advanced.failed_rewards]": FailedRewards,
    "[[advanced.rewards]]": RewardWeight,
    "[[advanced.rubrics]]": RubricWeight,
    "[[advanced.reward_models]]": RewardModelTable,
}
"""The tables of `[advanced]`. An evaluation has those of rewards and rubrics, too."""

TRIGGERS = """\
`headrace.toml` lies at the top of a repository. It holds `[[trigger]]` tables, at most 100, and has
at most 64 KiB. [A push trains](push-to-train.md) describes what happens with them."""


MCP = """\
`headrace.toml` may also hold `[[mcp]]` tables, at most 16."""


def config_markdown() -> str:
    """The content of docs/config.md: every key, section by section."""
    return "\n".join(_lines()) + "\n"


@cache
def meanings() -> dict[tuple[str, str], str]:
    """(class, key) -> the text below the key in the source. The source is read only when this page is
    written."""
    found = {}
    classes = (
        ast.parse(inspect.getsource(module)).body
        for module in (config, budget, datasets, reward_model, triggers, mcp_tables)
    )
    for cls in chain.from_iterable(classes):
        if isinstance(cls, ast.ClassDef):
            for key, below in pairwise(cls.body):
                match key, below:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(description))),
                    ):
                        found[cls.name, name] = " ".join(description.split())
    return found


def _lines() -> Iterator[str]:
    yield HEAD
    yield "## A run"
    yield from _sections(RunConfig)
    yield ""
    yield "## An evaluation"
    yield ""
    yield "`[experiment]`, `[env]` and `[secrets]` are those of a run."
    yield from _sections(EvalConfig, known=set(RunConfig.model_fields) - {"advanced"})
    yield ""
    yield "## Triggers"
    yield ""
    yield TRIGGERS
    yield ""
    yield from _table(Trigger)
    yield ""
    yield "## MCP servers"
    yield ""
    yield MCP
    yield ""
    yield from _table(McpTable)
    yield ""
    yield "## Shared code"
    yield ""
    yield from _table(WorkspaceTable)


def _sections(whole: type[Section], *, known: set[str] | None = None) -> Iterator[str]:
    description = meanings()
    for name, field in whole.model_fields.items():
        if name in (known or ()):
            continue
        kind = field.annotation
        yield ""
        yield f"### `[{name}]`"
        yield ""
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            text = f"{description[whole.__name__, name]}."
            yield from textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
            continue
        yield from _table(kind)
        if kind is Advanced:
            for heading, table in TABLES.items():
                yield from ("", f"### `{heading}`", "")
                yield from _table(table)


def _table(kind: type[BaseModel]) -> Iterator[str]:
    description = meanings()
    if kind.__doc__ and kind.__doc__ != Section.__doc__:
        text = " ".join((inspect.getdoc(kind) or "").split())
        yield from textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
        yield ""
    yield "| key | allowed values | default | meaning |"
    yield "|---|---|---|---|"
    for key, inner in kind.model_fields.items():
        cells = (
            f"`{key}`",
            allowed_values(inner),
            default_text(key, inner),
            description[kind.__name__, key],
        )
        yield f"| {' | '.join(cells)} |"


def allowed_values(field: FieldInfo) -> str:
    """The allowed values of a key, in words."""
    kind: Any = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kinds = [one for one in get_args(kind) if one is not type(None)]
        if len(kinds) > 1:
            has_words = any(get_origin(one) is Literal for one in kinds)
            return "number or text" if has_words else "text or list"
        (kind,) = kinds
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if kind is bool:
        return "`true`, `false`"
    if kind in NUMBERS:
        return " ".join((NUMBERS[kind], *_bounds(field)))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        return "list"
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "table"
    return "text"


def _bounds(field: FieldInfo) -> Iterator[str]:
    for name, word in BOUNDS.items():
        for bound in field.metadata:
            if (value := getattr(bound, name, None)) is not None:
                yield f"{word} {_number(value)}"


def _number(value: Any) -> str:
    return f"{value:,.10g}"


def default_text(key: str, field: FieldInfo) -> str:
    """The default of a key, in words."""
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "none"
    if field.default is None:
        return BY_ALGORITHM if key in READ_BY and field.annotation != Curriculum | None else ""
    if field.default == ():
        return "none"
    if isinstance(field.default, bool | str):
        return f"`{field.default}`".lower()
    if isinstance(field.default, tuple):
        return f"[{', '.join(map(_number, field.default))}]"
    return _number(field.default)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(config_markdown())
