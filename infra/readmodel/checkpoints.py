"""The checkpoints of all runs, and the uploads of checkpoints to model hubs, as the API shows them. For
an API key that is bound to a workspace, the checkpoints of others do not exist."""

from datetime import datetime
from typing import TypedDict, cast

from infra.ports.actor import visible_workspaces
from infra.readmodel.runs import PageRange
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


class ListedCheckpointJson(TypedDict):
    """`model` is the model that the run started from, and `tuning` what it trained: lora or full."""

    run: str
    run_name: str
    step: int
    ref: str
    model: str
    tuning: str
    workspace: str | None
    reward: float | None
    adapter_sha256: str
    created_at: datetime


class CheckpointPages:
    """Queries over checkpoints."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def page(
        self, page: PageRange, *, tuning: str | None = None
    ) -> tuple[list[ListedCheckpointJson], int]:
        """A page of checkpoints, and how many there are in all; only of runs with this tuning, if one is
        given."""
        chosen = (visible_workspaces(), tuning)
        rows = await self._pool.fetch(SQL["page_of_checkpoints"], *chosen, page.limit, page.offset)
        total = await self._pool.fetchval(SQL["count_all_checkpoints"], *chosen)
        return [cast(ListedCheckpointJson, dict(row)) for row in rows], int(total)
