"""Tags and notes of people on runs. They do not follow from the log, so a rebuild leaves them as they
are, and they are deleted with their run."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from infra.postgres.pool import Database
from infra.postgres.queries import queries

SQL = queries("read_model")


@dataclass(frozen=True, slots=True)
class RunNote:
    """The tags of a run, in alphabetical order, and the note about it."""

    tags: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class KeptNote:
    """A note, with who changed it last, and when."""

    note: RunNote
    changed_by: str | None
    changed_at: datetime


class RunNotes:
    """The table of notes."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def get(self, run: str) -> KeptNote | None:
        """The note on a run (its id); None when nobody has written one."""
        row = await self._pool.fetchrow(SQL["run_notes"], run)
        if row is None:
            return None
        note = RunNote(tuple(row["tags"]), row["note"])
        return KeptNote(note, row["changed_by"], row["changed_at"])

    async def change(
        self, run: str, change: Callable[[RunNote], RunNote], *, by: str | None
    ) -> RunNote:
        """Change the note on a run (its id). Changes at the same moment come one after the other."""
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(SQL["begin_run_notes"], run)
            row = await connection.fetchrow(SQL["lock_run_notes"], run)
            note = change(RunNote(tuple(row["tags"]), row["note"]))
            await connection.execute(SQL["set_run_notes"], run, list(note.tags), note.note, by)
        return note
