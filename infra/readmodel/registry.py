"""What the API reads about datasets, uploads, workspaces and evaluations."""

from datetime import datetime
from typing import TypedDict, cast

from infra.postgres.pool import Database
from infra.readmodel.runs import Page


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
    """`rollouts` is JSON text."""

    id: str
    name: str
    url: str
    status: str
    commit_sha: str | None
    rollouts: str
    error: str | None
    created_at: datetime
    updated_at: datetime | None


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


DATASET = """select dataset as id, name, 'uploaded' as status, null as error, file_name, file_size,
  num_rows, columns, ref::json -> 'content' ->> 'sha256' as sha256, created_at from datasets"""

UPLOAD = """select id, name, status, error, file_name, null::bigint, null::integer, null, null,
  created_at from dataset_uploads u
  where not exists (select from datasets d where d.dataset = u.id)"""

WORKSPACE = """select workspace as id, name, url, status, commit_sha, rollouts,
  nullif(error, '') as error, created_at, updated_at from workspaces"""

EVALUATION = """select evaluation as id, name, status, model, dataset, rollout, reward, metrics,
  created_at, started_at, completed_at, error, config, total, dataset_ref,
  (select count(*) from graded_groups g where g.owner = e.evaluation and g.purpose = 'evaluate')
  as completed from evaluations e"""


class Registry:
    """Queries over datasets and workspaces."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def datasets(self, page: Page) -> tuple[list[DatasetJson], int]:
        """The newest first, uploads that are not datasets yet included."""
        rows = await self._pool.fetch(
            f"select * from ({DATASET} union all {UPLOAD}) d order by created_at desc, id"  # noqa: S608 - constants
            " limit $1 offset $2",
            page.limit,
            page.offset,
        )
        total = await self._pool.fetchval(
            "select (select count(*) from datasets) + (select count(*) from dataset_uploads u where"
            " not exists (select from datasets d where d.dataset = u.id))"
        )
        return [cast(DatasetJson, dict(row)) for row in rows], int(total)

    async def dataset(self, ref: str) -> DatasetJson | None:
        """A dataset or upload by id or name."""
        row = await self._pool.fetchrow(
            f"select * from ({DATASET} union all {UPLOAD}) d where id = $1 or name = $1"  # noqa: S608 - constants
            " order by (id = $1) desc, (status = 'uploaded') desc limit 1",
            ref,
        )
        return cast(DatasetJson, dict(row)) if row else None

    async def workspaces(self, page: Page) -> tuple[list[WorkspaceJson], int]:
        rows = await self._pool.fetch(
            f"{WORKSPACE} order by created_at desc, workspace limit $1 offset $2",
            page.limit,
            page.offset,
        )
        total = await self._pool.fetchval("select count(*) from workspaces")
        return [cast(WorkspaceJson, dict(row)) for row in rows], int(total)

    async def workspace(self, ref: str) -> WorkspaceJson | None:
        """A workspace by id or name."""
        row = await self._pool.fetchrow(
            f"{WORKSPACE} where workspace = $1 or name = $1 order by (workspace = $1) desc limit 1",
            ref,
        )
        return cast(WorkspaceJson, dict(row)) if row else None


class Evaluations:
    """Queries over evaluations that users asked for; those of a run belong to the run."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def page(self, page: Page) -> tuple[list[EvaluationJson], int]:
        """The newest first."""
        rows = await self._pool.fetch(
            f"{EVALUATION} where run is null order by created_at desc, evaluation"
            " limit $1 offset $2",
            page.limit,
            page.offset,
        )
        total = await self._pool.fetchval("select count(*) from evaluations where run is null")
        return [cast(EvaluationJson, dict(row)) for row in rows], int(total)

    async def get(self, ref: str) -> EvaluationJson | None:
        """An evaluation by id or name."""
        row = await self._pool.fetchrow(
            f"{EVALUATION} where evaluation = $1 or name = $1"
            " order by (evaluation = $1) desc, created_at desc limit 1",
            ref,
        )
        return cast(EvaluationJson, dict(row)) if row else None


class Uploads:
    """Datasets that were announced and are not registered yet."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def announce(self, upload: str, name: str, file_name: str) -> None:
        """Expect content for a dataset; announcing it again starts over."""
        await self._pool.execute(
            "insert into dataset_uploads (id, name, file_name, status)"
            " values ($1, $2, $3, 'pending') on conflict (id) do update"
            " set file_name = excluded.file_name, status = 'pending', error = null",
            upload,
            name,
            file_name,
        )

    async def find(self, upload: str) -> tuple[str, str] | None:
        """The name and the file name of an announced upload."""
        row = await self._pool.fetchrow(
            "select name, file_name from dataset_uploads where id = $1", upload
        )
        return (row["name"], row["file_name"]) if row else None

    async def forget(self, upload: str) -> None:
        """Drop one that is not a dataset."""
        await self._pool.execute("delete from dataset_uploads where id = $1", upload)

    async def mark(self, upload: str, status: str, error: str | None = None) -> None:
        """processing, error (with the reason) or uploaded."""
        await self._pool.execute(
            "update dataset_uploads set status = $2, error = $3 where id = $1",
            upload,
            status,
            error,
        )
