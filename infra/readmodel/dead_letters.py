"""The queries of the API about dead letters."""

from datetime import datetime
from typing import TypedDict, cast

from infra.readmodel.runs import PageRange
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

SQL = queries("infra/readmodel/read_model.sql")

SHORTEST_REF = 8
"""How many characters of an id a caller must give at least."""


class LetterJson(TypedDict):
    """A dead letter as lists show it. `about` is the run, evaluation or workspace that it concerns, and
    `version` is its place in the stream of its consumer's dead letters."""

    id: str
    version: int
    consumer: str
    message_type: str
    about: str
    cause: str
    pauses: bool
    created_at: datetime
    redriven_at: datetime | None


class DeadLetterRows:
    """Queries over dead letters."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def page(
        self, page: PageRange, *, all_of_them: bool = False, about: str | None = None
    ) -> tuple[list[LetterJson], int]:
        """A page of dead letters, the newest first, and how many there are in all: those that wait, and
        with `all_of_them` also those that were redriven."""
        rows = await self._pool.fetch(
            SQL["page_of_letters"], all_of_them, about, page.limit, page.offset
        )
        total = await self._pool.fetchval(SQL["count_letters"], all_of_them, about)
        return [cast(LetterJson, dict(row)) for row in rows], int(total)

    async def find_letters(self, ref: str) -> list[LetterJson]:
        """The letters whose id begins with `ref`. Two are returned when it is ambiguous, and none when
        it is shorter than SHORTEST_REF."""
        if len(ref) < SHORTEST_REF:
            return []
        rows = await self._pool.fetch(
            SQL["letters_that_begin_with"],
            ref.lower(),
        )
        return [cast(LetterJson, dict(row)) for row in rows]

    async def waiting(self) -> int:
        """How many dead letters have not been redriven."""
        count: int = await self._pool.fetchval(SQL["count_waiting_letters"])
        return count
