"""The checkpoints of all runs, the newest first. For an API key that is bound to a workspace, those of
others do not exist."""

from datetime import datetime
from typing import TypedDict, cast

from infra.ports.actor import visible_workspaces
from infra.readmodel.runs import PageRange
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

SQL = queries("infra/readmodel/checkpoints.sql")


class CheckpointJson(TypedDict):
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
    ) -> tuple[list[CheckpointJson], int]:
        """A page of checkpoints, and how many there are in all; only of runs with this tuning, if one is
        given."""
        chosen = (visible_workspaces(), tuning)
        rows = await self._pool.fetch(SQL["page_of_checkpoints"], *chosen, page.limit, page.offset)
        total = await self._pool.fetchval(SQL["count_checkpoints"], *chosen)
        return [cast(CheckpointJson, dict(row)) for row in rows], int(total)
