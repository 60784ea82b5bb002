"""The application, over a database that each test has to itself."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.kit.application import Application, application
from tests.kit.copied_showcase import copied_showcase
from tests.kit.postgres import fresh_database
from tests.kit.signed_in import signed_in


@pytest.fixture
def showcase_steps() -> int | None:
    """How many steps the showcase has that the application shows. None for an application without one;
    a file whose tests all need it says another number."""
    return None


@pytest.fixture
def database_url(
    postgres_url: str,
    showcase_steps: int | None,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    if showcase_steps is None:
        with fresh_database(postgres_url) as url:
            yield url
        return
    home = tmp_path / "home"
    with copied_showcase(postgres_url, home, tmp_path_factory, steps=showcase_steps) as url:
        yield url


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    async with application(database_url, tmp_path / "home") as served:
        yield served


@pytest.fixture
async def browser(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    async with signed_in(app) as client:
        yield client
