"""A database that has what tests of held horizons need."""

from collections.abc import Iterator

import pytest

from tests.kit.postgres import fresh_database, need_programs
from tests.stack.postgres import postgres_server


@pytest.fixture
def preparing() -> Iterator[str]:
    """A database on a server that allows prepared transactions."""
    need_programs()
    with (
        postgres_server(settings={"max_prepared_transactions": "2"}) as server,
        fresh_database(server.url) as url,
    ):
        yield url
