"""`@tool`: a function that a model may call."""

import inspect
import re
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, overload

from headrace.tools.argument_types import TOP, Schema
from headrace.tools.signatures import CallSignature, call_signature
from headrace.tools.worker_threads import call_in_thread

F = TypeVar("F", bound=Callable[..., object])

MARK = "__headrace_tool__"
NAME = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")
CALL_TIMEOUT_S = 30.0
LONGEST_RESULT = 8_192
"""Characters of a result that the model gets, unless the tool says otherwise."""


class OfferedTool(Protocol):
    """A tool as the model sees it, and how it is called."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def parameters(self) -> Schema: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def max_characters(self) -> int: ...
    @property
    def is_async(self) -> bool: ...

    async def call(self, arguments: dict[str, object], context: object) -> object:
        """Call it and return its result. Raises ArgumentMismatch for arguments that do not fit, and
        whatever the tool raises."""
        ...


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function as a tool. A method belongs to the `owner` that it is bound to."""

    name: str
    function: Callable[..., object] = field(repr=False)
    signature: CallSignature = field(repr=False)
    timeout_s: float = CALL_TIMEOUT_S
    max_characters: int = LONGEST_RESULT
    text: str | None = None
    is_method: bool = False
    owner: object = field(default=None, repr=False)

    @property
    def description(self) -> str:
        return self.signature.description if self.text is None else self.text

    @property
    def parameters(self) -> Schema:
        return self.signature.arguments.schema

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def bind(self, owner: object) -> "FunctionTool":
        """Return the tool of this owner, if it is a method; otherwise the tool itself."""
        return replace(self, owner=owner) if self.is_method else self

    async def call(self, arguments: dict[str, object], context: object) -> object:
        values = typing.cast("dict[str, Any]", self.signature.arguments.read(arguments, TOP))
        if self.signature.context is not None:
            values = {**values, self.signature.context: context}
        before = (self.owner,) if self.is_method else ()
        if self.is_async:
            return await typing.cast("Awaitable[object]", self.function(*before, **values))
        answer = await call_in_thread(lambda: self.function(*before, **values))
        return await answer if inspect.isawaitable(answer) else answer


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
    max_characters: int = LONGEST_RESULT,
) -> Callable[[F], F]: ...
def tool(
    function: F | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
    max_characters: int = LONGEST_RESULT,
) -> F | Callable[[F], F]:
    """Mark a function, sync or async, as a tool that the model may call, and return it.

    The schema of its arguments comes from its type hints and its docstring. A call is ended after
    `timeout_s` seconds, and the model gets at most `max_characters` characters of the result. Raises
    TypeError for a function that a model cannot call, and ValueError for a limit that is not positive.
    """

    def mark(marked: F) -> F:
        made = function_tool(marked, name=name)
        if not timeout_s > 0 or not max_characters > 0:
            raise ValueError(f"the limits of the tool {made.name} must be above 0")
        limited = replace(
            made, timeout_s=timeout_s, max_characters=max_characters, text=description
        )
        setattr(marked, MARK, limited)
        return marked

    return mark if function is None else mark(function)


def function_tool(function: Callable[..., object], *, name: str | None = None) -> FunctionTool:
    """Return a function as a tool. Raises TypeError for a function that a model cannot call."""
    called = name if name is not None else getattr(function, "__name__", "")
    if not callable(function) or not NAME.fullmatch(called):
        raise TypeError(
            f"{called[:80]!r} cannot be the name of a tool; use 1 to 64 letters, digits, `_` and `-`"
        )
    first = next(iter(inspect.signature(function).parameters), None)
    is_method = first == "self" and inspect.isfunction(function)
    return FunctionTool(
        called, function, call_signature(function, is_method=is_method), is_method=is_method
    )


def marked_tool(value: object) -> FunctionTool | None:
    """Return the tool of a function that is marked by @tool, or else None."""
    found = getattr(value, MARK, None) if callable(value) else None
    return found if isinstance(found, FunctionTool) else None
