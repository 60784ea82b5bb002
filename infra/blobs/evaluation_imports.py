"""Imports of evaluations while their files arrive: what each consists of, and the upload of each file.

What is imported is an event. So a row here may be deleted at any time, and a client that repeats its
request makes it again.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

SQL = queries("infra/blobs/evaluation_imports.sql")

CLAIM_S = 60.0
"""How long a process that finalizes an import keeps others from doing so."""


@dataclass(frozen=True, slots=True)
class ImportSession:
    """An import: number `number` of an evaluation. `content` is what the client announced."""

    id: str
    evaluation: str
    number: int
    workspace: str
    content: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class UploadOfFile:
    """The upload of a file, and its status."""

    upload: str
    status: str


class ImportSessions:
    """The table of imports."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def add(
        self, identity: str, *, evaluation: str, number: int, workspace: str, content: str
    ) -> None:
        """Add an import, unless it is there."""
        await self._pool.execute(SQL["add"], identity, evaluation, number, workspace, content)

    async def find(self, identity: str) -> ImportSession | None:
        row: Any = await self._pool.fetchrow(SQL["find"], identity)
        return None if row is None else ImportSession(**row)

    async def uploads(self, identity: str) -> dict[str, UploadOfFile]:
        """The uploads that were begun, by path."""
        rows = await self._pool.fetch(SQL["uploads"], identity)
        return {row["path"]: UploadOfFile(row["upload"], row["status"]) for row in rows}

    async def set_upload(self, identity: str, path: str, upload: str) -> None:
        await self._pool.execute(SQL["set_upload"], identity, path, upload)

    async def drop_upload(self, identity: str, path: str) -> None:
        await self._pool.execute(SQL["drop_upload"], identity, path)

    async def claim(self, session: ImportSession) -> bool:
        """Keep other imports of the same evaluation from being finalized, for CLAIM_S. Returns False
        while another one is."""
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(SQL["lock_evaluation"], session.evaluation)
            return await connection.fetchval(SQL["claim"], session.id, CLAIM_S) is not None

    async def release(self, session: ImportSession) -> None:
        await self._pool.execute(SQL["release"], session.id)

    async def forget_old(self) -> None:
        """Delete the imports that began a week ago."""
        await self._pool.execute(SQL["forget_old"])
