"""Tests of a file that mostly wait, for a lease to run out or a process to start, and do so at the same
time.

Each of them is as it would be alone: a coroutine, with a database and a directory of its own if it asks
for them. The first one that runs starts all that were selected. Each test then raises what its own
coroutine raised.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import pytest

from tests.kit.postgres import fresh_database

Body = Callable[..., Coroutine[Any, Any, None]]


class AtOnce:
    """A decorator for the tests of one file that run at the same time."""

    def __init__(self) -> None:
        self._bodies: dict[str, Body] = {}
        self._errors: dict[str, BaseException | None] = {}

    def __call__(self, body: Body) -> Callable[..., None]:
        """The test of a coroutine function, which takes `database_url`, `tmp_path` or both."""
        name = body.__name__
        self._bodies[name] = body

        def test(
            request: pytest.FixtureRequest,
            postgres_url: str,
            tmp_path_factory: pytest.TempPathFactory,
        ) -> None:
            if name not in self._errors:
                items = (item for item in request.session.items if item.path == request.path)
                self._run({item.name for item in items} | {name}, postgres_url, tmp_path_factory)
            if (error := self._errors[name]) is not None:
                raise error

        test.__name__, test.__qualname__ = name, name
        test.__doc__, test.__module__ = body.__doc__, body.__module__
        return test

    def _run(self, names: set[str], postgres_url: str, directories: pytest.TempPathFactory) -> None:
        with ExitStack() as databases:
            started = {}
            for name, body in self._bodies.items():
                if name not in names:
                    continue
                asked = inspect.signature(body).parameters
                given: dict[str, Any] = {}
                if "database_url" in asked:
                    given["database_url"] = databases.enter_context(fresh_database(postgres_url))
                if "tmp_path" in asked:
                    given["tmp_path"] = directories.mktemp("at_once")
                started[name] = body(**given)
            self._errors |= asyncio.run(_errors_of(started))


async def _errors_of(
    started: dict[str, Coroutine[Any, Any, None]],
) -> dict[str, BaseException | None]:
    """What each coroutine raised."""
    found = await asyncio.gather(*started.values(), return_exceptions=True)
    return dict(zip(started, found, strict=True))
