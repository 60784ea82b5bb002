"""The queries of the API about datasets, artifacts, uploads, workspaces and evaluations. For an API
key that is bound to a workspace, the things of others do not exist. The notes on runs do not follow
from the log, so a rebuild leaves them as they are, and they are deleted with their run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypedDict, cast

from infra.names import several_error
from infra.ports.actor import (
    MAIN,
    acting,
    key_workspace,
    own_organisation,
    visible_organisation,
    visible_workspaces,
)
from infra.readmodel.runs import PageRange, escape_like
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import Conflict

SQL = queries("infra/readmodel/read_model.sql")

MAX_ERROR = 1000
"""Characters of the reason for which an upload was refused."""


class DatasetJson(TypedDict):
    """`columns` is JSON text. `workspace` is the only one that may use the dataset; None: all of
    `organisation` (an id; None: of `main`). `version` is None for an upload that is not a dataset yet,
    and `series` is the id of the first version."""

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
    workspace: str | None
    organisation: str | None
    version: int | None
    series: str
    is_newest: bool


class RejectedUpload(TypedDict):
    """An upload that is not a dataset, because its file was refused. `issues` is JSON text.
    `uploader` is the owner of the API key that sent it."""

    id: str
    name: str
    file_name: str
    error: str | None
    issues: str | None
    uploader: str | None
    workspace: str | None
    organisation: str | None
    rejected_at: datetime


class WorkspaceJson(TypedDict):
    """`rollouts` is JSON text. `forge` is the connected forge. `refs_error` says why its refs could
    not be listed, `push_error` what is wrong with the newest push that was examined, and
    `status_error` why the forge refused the last status of a commit. `organisation` is a name, and
    `repository` is `owner/repo`, which names the workspace too."""

    id: str
    name: str
    url: str
    status: str
    commit_sha: str | None
    rollouts: str
    error: str | None
    created_at: datetime
    updated_at: datetime | None
    forge: str | None
    default_branch: str | None
    refs_at: datetime | None
    refs_error: str | None
    push_error: str | None
    status_error: str | None
    organisation: str
    repository: str | None


class EvaluationJson(TypedDict):
    """`metrics` and `config` are JSON text; `total` and `completed` count groups (rows)."""

    id: str
    name: str
    status: str
    model: str
    dataset: str
    dataset_id: str
    dataset_version: int
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
    project: str | None


@dataclass(frozen=True, slots=True)
class EvaluationGroup:
    """A graded group of an evaluation. All but the numbers are JSON text. `attempts`
    says which attempts at the row the samples of a retry are; None: all of them, in order."""

    group: str
    step: int
    slot: int
    dataset_row: int
    artifact: str
    grades: str
    attempts: str | None
    judgements: str | None = None


class Registry:
    """Queries over datasets and workspaces."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def datasets(self, page: PageRange) -> tuple[list[DatasetJson], int]:
        """A page of datasets, the newest first, and how many there are in all. Uploads that are not
        datasets yet are included."""
        reach = (visible_workspaces(), visible_organisation())
        rows = await self._pool.fetch(SQL["page_of_datasets"], *reach, page.limit, page.offset)
        total = await self._pool.fetchval(SQL["count_datasets"], *reach)
        return [cast(DatasetJson, dict(row)) for row in rows], int(total)

    async def dataset(self, ref: str, *, version: int | None = None) -> DatasetJson | None:
        """A dataset or upload by id or name. A name means the newest version, unless one is given. For
        an API key that is bound to a workspace, that of the workspace comes before a shared one. Raises
        Conflict when several have the name."""
        rows = await self._pool.fetch(
            SQL["dataset"], visible_workspaces(), visible_organisation(), ref, version
        )
        own = key_workspace()
        nearest = [row for row in rows if own is not None and row["workspace"] == own] or rows
        first = {row["series"]: row for row in reversed(nearest)}
        row = _only("dataset", ref, [one for one in nearest if one is first[one["series"]]])
        return cast(DatasetJson, row)

    async def versions(self, series: str) -> list[DatasetJson]:
        """The versions of a dataset, by the id of its first one, the newest first."""
        reach = (visible_workspaces(), visible_organisation())
        rows = await self._pool.fetch(SQL["versions_of_dataset"], *reach, series)
        return [cast(DatasetJson, dict(row)) for row in rows]

    async def workspaces(self, page: PageRange) -> tuple[list[WorkspaceJson], int]:
        """A page of workspaces, the newest first, and how many there are in all."""
        rows = await self._pool.fetch(
            SQL["page_of_workspaces"],
            visible_workspaces(),
            page.limit,
            page.offset,
        )
        total = await self._pool.fetchval(SQL["count_workspaces"], visible_workspaces())
        return [cast(WorkspaceJson, dict(row)) for row in rows], int(total)

    async def workspace(self, ref: str) -> WorkspaceJson | None:
        """A workspace by id or name. Raises Conflict when several have the name."""
        rows = await self._pool.fetch(SQL["workspace"], ref, visible_workspaces())
        if len(rows) > 1 and rows[0]["id"] != ref:
            raise several_error("workspace", ref, [(r["id"], r["organisation"]) for r in rows])
        return cast(WorkspaceJson, dict(rows[0])) if rows else None


class Evaluations:
    """Queries over the evaluations that users requested. The evaluations of a run belong to the run."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def page(
        self, page: PageRange, project: str | None = None
    ) -> tuple[list[EvaluationJson], int]:
        """A page of evaluations, the newest first, and how many there are in all; with `project` only
        those with this label."""
        rows = await self._pool.fetch(
            SQL.variant("page_of_evaluations", evaluation_to_show=_reach()),
            visible_workspaces(),
            page.limit,
            page.offset,
            project,
        )
        total = await self._pool.fetchval(
            SQL.variant("count_evaluations", evaluation_to_show=_reach()),
            visible_workspaces(),
            project,
        )
        return [cast(EvaluationJson, dict(row)) for row in rows], int(total)

    async def get_evaluation(self, ref: str) -> EvaluationJson | None:
        """An evaluation by id or name. Raises Conflict when several have the name."""
        rows = await self._pool.fetch(
            SQL.variant("evaluation", evaluation_to_show=_reach()), visible_workspaces(), ref
        )
        asked = [row for row in rows if row["validated_run"] is None]
        row = _only("evaluation", ref, asked or rows[:1])
        if row is not None:
            del row["validated_run"]
        return cast(EvaluationJson, row)

    async def groups(self, evaluation: str) -> list[EvaluationGroup]:
        """All graded groups of an evaluation (its id), by slot; those of later retries come later."""
        rows = await self._pool.fetch(SQL["groups_of_evaluation"], evaluation)
        return [
            EvaluationGroup(
                group=f"{evaluation}-evaluate-{row['step']}-{row['slot']}-{row['replacement']}",
                step=row["step"],
                slot=row["slot"],
                dataset_row=row["dataset_row"],
                artifact=row["artifact"],
                grades=row["grades"],
                attempts=row["attempts"],
                judgements=row["judgements"],
            )
            for row in rows
        ]


def _only(kind: str, ref: str, rows: Sequence[Any]) -> dict[str, Any] | None:
    """The only row, or that with this id, without the name of its workspace. None without rows. Raises
    Conflict for several."""
    if not rows:
        return None
    if len(rows) > 1 and rows[0]["id"] != ref:
        raise several_error(kind, ref, [(row["id"], row["workspace_name"]) for row in rows])
    found = dict(rows[0])
    del found["workspace_name"]
    return found


def _reach() -> str:
    return "in_any_workspace" if visible_workspaces() is None else "in_workspace"


class ArtifactJson(TypedDict):
    """A published version of an artifact. `organisation` is an id, `size` that of the archive in bytes,
    and `published_by` the owner and the id of an API key."""

    id: str
    organisation: str
    kind: str
    name: str
    version: str
    is_prerelease: bool
    sha256: str
    size: int
    num_files: int
    unpacked_bytes: int
    summary: str
    published_by: str | None
    created_at: datetime
    num_versions: int


@dataclass(frozen=True, slots=True)
class ArtifactFilter:
    """The artifacts to list: those of one organisation (its id), of a kind, and with these words in the
    name or the summary. None: all."""

    organisation: str
    kind: str | None = None
    search: str | None = None
    sort: Literal["name", "created_at"] = "created_at"
    is_ascending: bool = False


class ArtifactRows:
    """Queries over published versions of artifacts. Each is about one organisation (its id)."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def page(self, page: PageRange, chosen: ArtifactFilter) -> tuple[list[ArtifactJson], int]:
        """A page of artifacts, each with its latest version, and how many there are in all."""
        pattern = f"%{escape_like(chosen.search)}%" if chosen.search else None
        what = (chosen.organisation, chosen.kind, pattern)
        order = f"by_{chosen.sort}_{'up' if chosen.is_ascending else 'down'}"
        query = SQL.variant("page_of_artifacts", order=order)
        rows = await self._pool.fetch(query, *what, page.limit, page.offset)
        total = await self._pool.fetchval(SQL["count_artifacts"], *what)
        return [cast(ArtifactJson, dict(row)) for row in rows], int(total)

    async def versions(self, organisation: str, kind: str, name: str) -> list[ArtifactJson]:
        """The versions of an artifact, the highest first."""
        rows = await self._pool.fetch(SQL["versions_of_artifact"], organisation, kind, name)
        return [cast(ArtifactJson, dict(row)) for row in rows]

    async def latest(self, organisation: str, kind: str, name: str) -> str | None:
        """The highest release of an artifact, or its highest pre-release when it has no release."""
        found: str | None = await self._pool.fetchval(
            SQL["latest_artifact"], organisation, kind, name
        )
        return found


class Uploads:
    """Datasets that were announced and are not registered yet."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def announce(self, upload: str, name: str, file_name: str) -> None:
        """Expect content for a dataset. A second announcement starts over. Raises Conflict when the name
        belongs to another workspace."""
        announced = await self._pool.fetchval(
            SQL["announce_upload"],
            upload,
            name,
            file_name,
            key_workspace(),
            None if (organisation := own_organisation()) == MAIN else organisation,
        )
        if announced is None:
            raise Conflict(
                f"the name {name} is already used by another dataset; choose another name"
            )

    async def find_upload(self, upload: str) -> tuple[str, str] | None:
        """The name and the file name of an announced upload."""
        shared = None if key_workspace() is not None else visible_organisation()
        row = await self._pool.fetchrow(SQL["upload"], upload, visible_workspaces(), shared)
        return (row["name"], row["file_name"]) if row else None

    async def forget(self, upload: str) -> None:
        """Remove an upload that is not a dataset."""
        await self._pool.execute(SQL["forget_upload"], upload)

    async def mark(self, upload: str, status: str) -> None:
        """Set the status: processing or uploaded."""
        await self._pool.execute(SQL["mark_upload"], upload, status)

    async def reject(self, upload: str, error: str, *, issues: str) -> None:
        """Record that the file was refused, for whom, and why. `issues` is JSON text. A long error is
        cut."""
        actor = acting()
        await self._pool.execute(
            SQL["reject_upload"],
            upload,
            error.replace("\0", "\N{REPLACEMENT CHARACTER}")[:MAX_ERROR],
            issues,
            actor.owner if actor is not None else None,
        )

    async def list_rejected(self, limit: int) -> tuple[list[RejectedUpload], int]:
        """The uploads that were refused last, the newest first, and how many there are in all."""
        reach = (visible_workspaces(), visible_organisation())
        rows = await self._pool.fetch(SQL["page_of_rejected_uploads"], *reach, limit)
        total = await self._pool.fetchval(SQL["count_rejected_uploads"], *reach)
        return [cast(RejectedUpload, dict(row)) for row in rows], int(total)

    async def find_rejected(self, upload: str) -> RejectedUpload | None:
        """The upload with this id, if it was refused."""
        row = await self._pool.fetchrow(
            SQL["rejected_upload"], visible_workspaces(), visible_organisation(), upload
        )
        return cast(RejectedUpload, dict(row)) if row else None


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

    async def get_notes(self, run: str) -> KeptNote | None:
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
