"""Puts other texts into the place of every text that a page is made of.

The values of each template are replaced right before it is rendered, whatever they are. So a page or a
field that is added later is covered without a word here.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import jinja2
import pytest
from pydantic import BaseModel

KEPT = frozenset({"form_key", "actor", "path"})
"""Values that are ours, and without which a page is another one."""


class Poison:
    """Takes texts in turn. `num_replaced` counts the texts that were replaced."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = cycle(texts)
        self.num_replaced = 0

    def text(self, _: str) -> str:
        self.num_replaced += 1
        return next(self._texts)

    def values(self, found: Mapping[str, object]) -> dict[str, object]:
        """The values of a template with other texts."""
        return {key: one if key in KEPT else replace(one, self.text) for key, one in found.items()}


def replace(value: object, text: Callable[[str], str]) -> Any:
    """The same value with every text in it replaced. The keys of dictionaries stay."""
    if type(value) is str:
        return text(value)
    if isinstance(value, Mapping):
        return {key: replace(inner, text) for key, inner in value.items()}
    if isinstance(value, BaseModel):
        fields = {name: replace(getattr(value, name), text) for name in type(value).model_fields}
        return value.model_copy(update=fields)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Its constructor may check what it is given.
        copied = object.__new__(type(value))
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, replace(getattr(value, field.name), text))
        return copied
    if type(value) in (list, tuple):
        return type(value)(replace(inner, text) for inner in value)  # type: ignore[call-arg, attr-defined]  # both take items
    return value


@dataclasses.dataclass(frozen=True)
class RenderedPage:
    """A template and the values that a page was made of."""

    template: jinja2.Template
    values: Mapping[str, object]

    def render(self, poison: Poison) -> str:
        """The page with other texts."""
        return self.template.render(poison.values(self.values))


@contextmanager
def recorded_pages() -> Iterator[list[RenderedPage]]:
    """The pages that are rendered in this process."""
    found: list[RenderedPage] = []
    render = jinja2.Template.render

    def record(self: jinja2.Template, *arguments: Any, **named: Any) -> str:
        found.append(RenderedPage(self, dict(*arguments, **named)))
        return render(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Template, "render", record)
        yield found


@contextmanager
def poisoned_pages(texts: Sequence[str]) -> Iterator[Poison]:
    """Every page that is rendered in this process is made of these texts."""
    poison, render = Poison(texts), jinja2.Template.render

    def replaced(self: jinja2.Template, *arguments: Any, **named: Any) -> str:
        return render(self, poison.values(dict(*arguments, **named)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Template, "render", replaced)
        yield poison
