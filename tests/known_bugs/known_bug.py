"""A known bug: a bug that a public trainer really had, inserted into our code for the duration of a
test.

A mutation replaces a piece of one function's source and swaps the function's code object, so that
every caller gets the mutant, however it imported the function. The piece must occur in the source
exactly once: code that moves on takes its known bugs along, or their test says so.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class KnownBug:
    """`bug` in one line, `seen` as owner/repository#number, `code` as module:function, the piece `old`
    of it and its mutant `new`, and the `test` that kills it, as path::function with arguments
    `given`."""

    bug: str
    seen: str
    code: str
    old: str
    new: str
    test: str
    given: dict[str, Any] = field(default_factory=dict)


def function_of(code: str) -> FunctionType:
    """The function that `module:qualified.name` names, without its decorators."""
    module, _, names = code.partition(":")
    named: Any = reduce(getattr, names.split("."), import_module(module))
    found = inspect.unwrap(named)
    assert isinstance(found, FunctionType)
    return found


def mutant(known_bug: KnownBug) -> CodeType:
    """The code of the function with the bug in it."""
    function = function_of(known_bug.code)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(known_bug.old) == 1, f"{known_bug.bug}: {known_bug.code} has changed"
    tree = ast.parse(source.replace(known_bug.old, known_bug.new))
    module = compile(tree, f"<{known_bug.bug}>", "exec")
    (code,) = [
        c
        for c in module.co_consts
        if isinstance(c, CodeType) and c.co_name == function.__code__.co_name
    ]
    return code


@contextmanager
def put_in(known_bug: KnownBug) -> Iterator[None]:
    """The bug is in our code until the block ends."""
    function = function_of(known_bug.code)
    healthy = function.__code__
    function.__code__ = mutant(known_bug)
    try:
        yield
    finally:
        function.__code__ = healthy


def killer_of(known_bug: KnownBug) -> Callable[..., Any]:
    """The test that kills it."""
    path, _, name = known_bug.test.partition("::")
    module = import_module(path.removesuffix(".py").replace("/", "."))
    found: Callable[..., Any] = getattr(module, name)
    return found
