"""Finds the database that this machine's settings name, for commands that work on it directly."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from producers.cli.errors import Failure

if TYPE_CHECKING:
    from infra.settings.settings import Settings


@contextmanager
def existing_database(settings: "Settings") -> Iterator[str]:
    """The URL of an existing database. An embedded database that is not running is started, and stopped
    at the end of the block. Raises Failure when there is no database."""
    from infra.operations.local import embedded_postgres as embedded
    from infra.operations.local import home

    if settings.database_url is not None:
        yield settings.database_url
        return
    place = embedded.place_of(settings.home)
    if place is None:
        raise Failure(
            "NOT_FOUND",
            f"{settings.home} has no database; set HEADRACE_HOME to another home, or "
            "HEADRACE_DATABASE_URL to a server",
        )
    if home.owner(settings.home) is not None:
        yield place.url
        return
    with home.own(settings.home):
        server = embedded.start(settings.home)
        try:
            yield server.url
        finally:
            server.stop()


@contextmanager
def new_database(settings: "Settings") -> Iterator[str]:
    """The URL of a database to fill. It is the one that HEADRACE_DATABASE_URL names, or a new one in
    HEADRACE_HOME. Raises Conflict while a server is running there."""
    from infra.operations.local import embedded_postgres as embedded
    from infra.operations.local import home

    if settings.database_url is not None:
        yield settings.database_url
        return
    home.prepare(settings.home)
    with home.own(settings.home):
        server = embedded.start(settings.home)
        try:
            yield server.url
        finally:
            server.stop()
