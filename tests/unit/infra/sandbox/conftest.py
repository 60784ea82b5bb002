"""User code as tests of its sandbox run it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.sandbox.sandbox import LocalUserCode
from tests.kit.sandboxed_code import open_user_code


@pytest.fixture
async def user(tmp_path: Path) -> AsyncIterator[LocalUserCode]:
    (tmp_path / "home").mkdir(mode=0o700)
    async with open_user_code("bwrap") as made:
        yield made


@pytest.fixture
async def trusted() -> AsyncIterator[LocalUserCode]:
    """At the level where user code shares files and process ids with the test."""
    async with open_user_code("process-trusted") as made:
        yield made
