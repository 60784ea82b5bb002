"""An engine over bytes held in memory."""

from collections.abc import AsyncIterator

import pytest

from tests.unit.trainer.support import Shelf
from trainer.engine import Engine


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
async def engine(shelf: Shelf) -> AsyncIterator[Engine]:
    engine = Engine(fetch=shelf.fetch, threads=1)
    yield engine
    await engine.aclose()
