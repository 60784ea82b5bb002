"""The uploads of checkpoints to model hubs, as the API shows them."""

from datetime import datetime
from typing import TypedDict, cast

from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

SQL = queries("infra/readmodel/read_model.sql")


class HubUploadJson(TypedDict):
    """An upload. `status` is `requested`, `uploaded` or `failed`. `waiting` is why a requested one was
    not finished by its last attempt, if there was one."""

    id: str
    ref: str
    repository: str
    form: str
    visibility: str
    status: str
    url: str | None
    revision: str | None
    error: str | None
    waiting: str | None
    requested_by: str | None
    created_at: datetime
    updated_at: datetime | None


class HubUploadRows:
    """Queries over uploads."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def of(self, run: str, *, step: int | None = None) -> list[HubUploadJson]:
        """The uploads of a run's checkpoints, or of one of them, the newest first; at most 100."""
        rows = await self._pool.fetch(SQL["hub_uploads"], run, step)
        return [cast(HubUploadJson, dict(row)) for row in rows]
