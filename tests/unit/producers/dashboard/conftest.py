"""The application, over a database that each test has to itself."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kit.application import Application, application


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    async with application(database_url, tmp_path / "home") as served:
        yield served
