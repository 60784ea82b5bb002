"""The application, over a database that each test has to itself."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.kit.application import Application, application
from tests.kit.signed_in import signed_in


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    async with application(database_url, tmp_path / "home") as served:
        yield served


@pytest.fixture
async def browser(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    async with signed_in(app) as client:
        yield client
