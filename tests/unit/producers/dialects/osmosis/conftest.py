"""The application with two workspaces, of which the client sees one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kit.application import Application, application
from tests.kit.tenants import Tenant, tenant


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    repositories = [f"https://git.example/acme/{name}" for name in ("ours", "theirs", "new")]
    async with application(
        database_url, tmp_path / "home", repositories=tuple(repositories)
    ) as served:
        yield served


@pytest.fixture
async def ours(app: Application) -> Tenant:
    return await tenant(app, "ours", "https://git.example/acme/ours")


@pytest.fixture
async def theirs(app: Application) -> Tenant:
    return await tenant(app, "theirs", "https://git.example/acme/theirs")
