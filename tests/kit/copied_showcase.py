"""The database of a showcase for each of many tests: it is filled once, and then copied.

Filling takes several times as long as a copy. The copies have their blobs in one directory, because
events name them with it. So a test that removes blobs calls `fill` itself, and so does one that looks at
what happens while the showcase is filled.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest

from tests.kit.application import application
from tests.kit.postgres import TEMPLATE, copy_database, database_of, new_database
from tests.kit.showcase import fill

BLOBS = "blobs"


class _Kept(NamedTuple):
    """A filled database, which nobody opens, and the home with its blobs."""

    database: str
    home: Path


_kept: dict[tuple[str, int], _Kept] = {}


@contextmanager
def copied_showcase(
    postgres_url: str, home: Path, directories: pytest.TempPathFactory, *, steps: int
) -> Iterator[str]:
    """The URL of a database of its own with the showcase of so many steps, dropped at the end. `home`
    gets its blobs."""
    place = (postgres_url, steps)
    if place not in _kept:
        made = _Kept(f"showcase_{uuid4().hex[:12]}", directories.mktemp("showcase") / "home")
        asyncio.run(_fill(postgres_url, made, steps))
        _kept[place] = made
    home.mkdir()
    (home / BLOBS).symlink_to(_kept[place].home / BLOBS)
    with new_database(postgres_url, template=_kept[place].database) as url:
        yield url


async def _fill(postgres_url: str, made: _Kept, steps: int) -> None:
    await copy_database(postgres_url, TEMPLATE, made.database)
    async with application(database_of(postgres_url, made.database), made.home) as app:
        await fill(app, steps=steps)
