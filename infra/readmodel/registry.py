"""The queries of the API about datasets, uploads, workspaces and evaluations."""

from datetime import datetime
from typing import TypedDict, cast

from infra.postgres.pool import Database
from infra.postgres.queries import queries
from infra.readmodel.runs import PageRange

SQL = queries("read_model")


class DatasetJson(TypedDict):
    """`columns` and `original` are JSON text."""

    id: str
    name: str
    status: str
    error: str | None
    file_name: str
    file_size: int | None
    num_rows: int | None
    columns: str | None
    sha256: str | None
    created_at: datetime


class WorkspaceJson(TypedDict):
    """`rollouts` is JSON text. `provider` is the connected forge. `refs_error` says why its refs could
    not be listed, and `push_error` what is wrong with the last push."""

    id: str
    name: str
    url: str
    status: str
    commit_sha: str | None
    rollouts: str
    error: str | None
    created_at: datetime
    updated_at: datetime | None
    provider: str | None
    default_branch: str | None
    refs_at: datetime | None
    refs_error: str | None
    push_error: str | None


class EvaluationJson(TypedDict):
    """`metrics` and `config` are JSON text; `total` and `completed` count groups (rows)."""

    id: str
    name: str
    status: str
    model: str
    dataset: str
    rollout: str | None
    reward: float | None
    metrics: str
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    error: str | None
    config: str | None
    completed: int
    total: int
    dataset_ref: str


class Registry:
    """Queries over datasets and workspaces."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def datasets(self, page: PageRange) -> tuple[list[DatasetJson], int]:
        """A page of datasets, the newest first, and how many there are in all. Uploads that are not
        datasets yet are included."""
        rows = await self._pool.fetch(
            SQL["page_of_datasets"],
            page.limit,
            page.offset,
        )
        total = await self._pool.fetchval(SQL["count_datasets"])
        return [cast(DatasetJson, dict(row)) for row in rows], int(total)

    async def dataset(self, ref: str) -> DatasetJson | None:
        """A dataset or upload by id or name."""
        row = await self._pool.fetchrow(
            SQL["dataset"],
            ref,
        )
        return cast(DatasetJson, dict(row)) if row else None

    async def workspaces(self, page: PageRange) -> tuple[list[WorkspaceJson], int]:
        """A page of workspaces, the newest first, and how many there are in all."""
        rows = await self._pool.fetch(
            SQL["page_of_workspaces"],
            page.limit,
            page.offset,
        )
        total = await self._pool.fetchval(SQL["count_workspaces"])
        return [cast(WorkspaceJson, dict(row)) for row in rows], int(total)

    async def workspace(self, ref: str) -> WorkspaceJson | None:
        """A workspace by id or name."""
        row = await self._pool.fetchrow(
            SQL["workspace"],
            ref,
        )
        return cast(WorkspaceJson, dict(row)) if row else None


class Evaluations:
    """Queries over the evaluations that users requested. The evaluations of a run belong to the run."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def page(self, page: PageRange) -> tuple[list[EvaluationJson], int]:
        """A page of evaluations, the newest first, and how many there are in all."""
        rows = await self._pool.fetch(
            SQL["page_of_evaluations"],
            page.limit,
            page.offset,
        )
        total = await self._pool.fetchval(SQL["count_evaluations"])
        return [cast(EvaluationJson, dict(row)) for row in rows], int(total)

    async def get(self, ref: str) -> EvaluationJson | None:
        """An evaluation by id or name."""
        row = await self._pool.fetchrow(
            SQL["evaluation"],
            ref,
        )
        return cast(EvaluationJson, dict(row)) if row else None


class Uploads:
    """Datasets that were announced and are not registered yet."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def announce(self, upload: str, name: str, file_name: str) -> None:
        """Expect content for a dataset. A second announcement starts over."""
        await self._pool.execute(
            SQL["announce_upload"],
            upload,
            name,
            file_name,
        )

    async def find(self, upload: str) -> tuple[str, str] | None:
        """The name and the file name of an announced upload."""
        row = await self._pool.fetchrow(SQL["upload"], upload)
        return (row["name"], row["file_name"]) if row else None

    async def forget(self, upload: str) -> None:
        """Remove an upload that is not a dataset."""
        await self._pool.execute(SQL["forget_upload"], upload)

    async def mark(self, upload: str, status: str, error: str | None = None) -> None:
        """Set the status: processing, error (with the reason) or uploaded."""
        await self._pool.execute(
            SQL["mark_upload"],
            upload,
            status,
            error,
        )
