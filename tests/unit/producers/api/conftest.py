"""The application, over a database of each test's own."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.kit.application import Application, application, fresh_database, started


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from started(tmp_path_factory.mktemp("api-postgres"))


@pytest.fixture
async def app(server: str, tmp_path: Path) -> AsyncIterator[Application]:
    async with fresh_database(server) as url, application(url, tmp_path / "home") as served:
        yield served
