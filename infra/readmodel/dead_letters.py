"""What the API reads about dead letters."""

from datetime import datetime
from typing import TypedDict, cast

from infra.postgres.pool import Database
from infra.readmodel.runs import Page

SHORTEST = 8
"""So many characters of an id are enough where they name one letter."""

SUMMARY = (
    "letter as id, version, consumer, message_type, about, cause, pauses, created_at, redriven_at"
)


class LetterJson(TypedDict):
    """A dead letter as lists show it. `about` is the run, evaluation or workspace; `version` its place
    in its consumer's stream."""

    id: str
    version: int
    consumer: str
    message_type: str
    about: str
    cause: str
    pauses: bool
    created_at: datetime
    redriven_at: datetime | None


class Letters:
    """Queries over dead letters."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def page(
        self, page: Page, *, all_of_them: bool = False, about: str | None = None
    ) -> tuple[list[LetterJson], int]:
        """The newest first, and how many there are: those that wait, or also those driven again."""
        condition = "($1 or redriven_at is null) and ($2::text is null or about = $2)"
        rows = await self._pool.fetch(
            f"select {SUMMARY} from dead_letters where {condition}"  # noqa: S608 - constants
            " order by created_at desc, letter limit $3 offset $4",
            all_of_them,
            about,
            page.limit,
            page.offset,
        )
        total = await self._pool.fetchval(
            f"select count(*) from dead_letters where {condition}",  # noqa: S608 - constants
            all_of_them,
            about,
        )
        return [cast(LetterJson, dict(row)) for row in rows], int(total)

    async def find(self, ref: str) -> list[LetterJson]:
        """The letters whose id begins so; more than one only where it is not said which."""
        if len(ref) < SHORTEST:
            return []
        rows = await self._pool.fetch(
            f"select {SUMMARY} from dead_letters"  # noqa: S608 - constants
            " where starts_with(letter, $1) order by letter limit 2",
            ref.lower(),
        )
        return [cast(LetterJson, dict(row)) for row in rows]

    async def waiting(self) -> int:
        """How many have not been driven again."""
        count: int = await self._pool.fetchval(
            "select count(*) from dead_letters where redriven_at is null"
        )
        return count
