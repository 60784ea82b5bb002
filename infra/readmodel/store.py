"""The read model on Postgres: what the projector writes, and the queries that the API reads.

A batch and the cursor that it moves are one transaction, so a crash never shows half a batch or counts
one twice. The commit does not wait for the disk, because the log can always be projected again. Except
for names, notes on runs, uploads and workers, every table is a function of the log: `reset` empties
them, and the projector fills them again.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from infra.costs.ledger import Costs
from infra.names import PostgresNames
from infra.readmodel.checkpoints import CheckpointPages, HubUploadRows
from infra.readmodel.dead_letters import DeadLetterRows
from infra.readmodel.deliveries import Deliveries
from infra.readmodel.deployments import Deployments
from infra.readmodel.platform import PlatformState
from infra.readmodel.registry import ArtifactRows, Evaluations, Registry, RunNotes, Uploads
from infra.readmodel.rows import (
    ChangeDeployment,
    ChangeEvaluation,
    ChangeHubUpload,
    ChangeLetter,
    ChangeNamedDeployment,
    ChangePush,
    ChangeRun,
    ChangeTriggeredRun,
    ChangeWorkspace,
    DropArtifact,
    DropDataset,
    DropGivenSecrets,
    DropHistory,
    DropReplacedGroups,
    DropRun,
    DropSkippedEvent,
    PutArtifact,
    PutCheckpoint,
    PutCost,
    PutDataset,
    PutDelivery,
    PutDeployment,
    PutEvaluation,
    PutGroup,
    PutHubUpload,
    PutLetter,
    PutLog,
    PutMetric,
    PutPush,
    PutRun,
    PutSkippedEvent,
    PutTriggeredRun,
    PutWorkspace,
    Unarchive,
    Write,
)
from infra.readmodel.run_pages import RunPages
from infra.readmodel.runs import Runs
from infra.readmodel.skipped_events import SkippedEvents
from infra.readmodel.stalled_effects import StalledEffects
from infra.readmodel.state_at_event import StateAtEvent
from infra.readmodel.timeline import Timelines
from infra.readmodel.wait_facts import Waits
from infra.readmodel.worker_chats import WorkerChats
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.errors import is_data_error
from infra.spine.postgres.notify import News
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import Refused
from schemas.events import EVENT_TYPES
from schemas.ids import ConsumerName, StreamName

SQL = queries("infra/readmodel/read_model.sql")

PROJECT = ConsumerName("project")
"""The watermark that is the read model's cursor."""

PUTS: tuple[tuple[type[Write], str], ...] = (
    (PutRun, "runs"),
    (PutDataset, "datasets"),
    (PutArtifact, "published_artifacts"),
    (PutWorkspace, "workspaces"),
    (PutDelivery, "deliveries"),
    (PutPush, "pushes"),
    (PutTriggeredRun, "triggered_runs"),
    (PutEvaluation, "evaluations"),
    (PutMetric, "metric_points"),
    (PutCheckpoint, "checkpoints"),
    (PutGroup, "graded_groups"),
    (PutCost, "costs"),
    (PutLog, "log_lines"),
    (PutLetter, "dead_letters"),
    (PutDeployment, "deployments"),
    (PutHubUpload, "hub_uploads"),
    (PutSkippedEvent, "skipped_events"),
)
CHANGES: tuple[tuple[type[Write], str, str], ...] = (
    (ChangeRun, "runs", "run"),
    (ChangeWorkspace, "workspaces", "workspace"),
    (ChangePush, "pushes", "push"),
    (ChangeTriggeredRun, "triggered_runs", "run"),
    (ChangeEvaluation, "evaluations", "evaluation"),
    (ChangeLetter, "dead_letters", "letter"),
    (ChangeDeployment, "deployments", "key"),
    (ChangeHubUpload, "hub_uploads", "upload"),
)

HISTORY = (
    "drop_log_lines_without_events",
    "drop_skipped_events_without_events",
    "drop_costs_without_events",
    "drop_groups",
    "drop_evaluations",
    "drop_metrics",
)
DROPS: tuple[tuple[type[Write], str, tuple[str, ...]], ...] = (
    (DropHistory, "run", HISTORY),
    (
        DropRun,
        "run",
        (
            *HISTORY,
            "drop_costs",
            "drop_log_lines",
            "drop_checkpoints",
            "drop_hub_uploads",
            "drop_run_notes",
            "drop_run_shares",
            "drop_run_alerts",
            "drop_run",
        ),
    ),
    (DropSkippedEvent, "event", ("drop_skipped_event",)),
    (DropDataset, "dataset", ("drop_dataset",)),
    (DropArtifact, "artifact", ("drop_artifact",)),
    (
        Unarchive,
        "run",
        ("drop_log_lines_without_events", "drop_sums_of_costs", "unarchive_run"),
    ),
)
"""The rows that are removed because their events left the log, by query names. A batch does this
last."""

LOOK_EVERY_S = 0.05
"""How often a waiter looks at the cursor of a projector in another process."""

COLUMN_TYPES = {
    "step": "integer",
    "slot": "integer",
    "replacement": "integer",
    "dataset_row": "integer",
    "num_samples": "integer",
    "num_rows": "integer",
    "line": "integer",
    "total": "integer",
    "current_step": "integer",
    "parent_step": "integer",
    "total_steps": "integer",
    "xid": "bigint",
    "position": "bigint",
    "num_files": "integer",
    "file_size": "bigint",
    "unpacked_bytes": "bigint",
    "is_prerelease": "boolean",
    "reward": "double precision",
    "value": "double precision",
    "device_s": "double precision",
    "wasted_s": "double precision",
    "calls_usd": "double precision",
    "sampled": "bigint",
    "trained": "bigint",
    "discarded": "bigint",
    "calls_tokens": "bigint",
    "stored_bytes": "bigint",
    "at": "timestamptz",
    "created_at": "timestamptz",
    "started_at": "timestamptz",
    "completed_at": "timestamptz",
    "updated_at": "timestamptz",
    "last_at": "timestamptz",
    "redriven_at": "timestamptz",
    "archived_at": "timestamptz",
    "restored_at": "timestamptz",
    "deployed_at": "timestamptz",
    "version": "integer",
    "pauses": "boolean",
    "number": "bigint",
    "trigger": "integer",
    "baseline": "boolean",
    "examined": "boolean",
    "forced": "boolean",
    "refs_at": "timestamptz",
}
"""Columns that are not text."""

W = TypeVar("W")


class RowsRefused(Refused):
    """Nothing was written, and a retry does not help, because the database cannot hold a row."""


class ReadModel:
    """Applies writes. The attributes (`runs`, `registry`, `letters`, ...) hold the queries."""

    def __init__(self, database: Database) -> None:
        self._lazy = database.lazy
        self._moved = asyncio.Event()
        self._at = Cursor()
        self._history_epoch = 0
        self.names = PostgresNames(database)
        self.runs = Runs(database)
        self.run_pages = RunPages(database)
        self.checkpoint_pages = CheckpointPages(database)
        self.run_notes = RunNotes(database)
        self.registry = Registry(database)
        self.artifacts = ArtifactRows(database)
        self.deliveries = Deliveries(database)
        self.evaluations = Evaluations(database)
        self.uploads = Uploads(database)
        self.chats = WorkerChats(database)
        self.platform = PlatformState(database)
        self.letters = DeadLetterRows(database)
        self.deployments = Deployments(database)
        self.hub_uploads = HubUploadRows(database)
        self.timelines = Timelines(database)
        self.state_at_event = StateAtEvent(database)
        self.skipped_events = SkippedEvents(database, PROJECT)
        self.stalled = StalledEffects(database)
        self.waits = Waits(database)
        self.costs = Costs(database)

    async def cursor(self) -> Cursor:
        """The cursor up to which the log is projected."""
        row = await self._lazy.fetchrow(SQL["cursor"], PROJECT)
        return Cursor(row["xid"], row["position"]) if row else Cursor()

    async def apply(self, writes: Sequence[Write], *, before: Cursor, after: Cursor) -> bool:
        """Write a batch and move the cursor from `before` to `after`. Returns False, with nothing
        written, when the cursor is not at `before`, because another process projects too. Raises
        RowsRefused, with nothing written, when the database cannot hold a row."""
        try:
            async with self._lazy.acquire() as connection, connection.transaction():
                if not await _move(connection, before, after):
                    return False
                for part in _in_order(writes):
                    await _write(connection, part)
        except Exception as error:  # drivers raise errors of their own
            if not is_data_error(error):
                raise
            raise RowsRefused(f"the database cannot hold it: {error}") from error
        self._at = after
        self._moved.set()
        return True

    async def left_for_newer(self) -> Sequence[tuple[StreamName, int]]:
        """The places of the events that a projector of an older release skipped, and this one knows."""
        versions = [kind.version for kind in EVENT_TYPES.values()]
        rows = await self._lazy.fetch(SQL["left_for_newer"], PROJECT, list(EVENT_TYPES), versions)
        return [(StreamName(row["stream"]), row["version"]) for row in rows]

    async def caught_up(self, cursor: Cursor, *, timeout_s: float = 2.0) -> bool:
        """Wait until everything up to `cursor` is projected, so that a caller can read what it wrote.
        Returns whether it was within `timeout_s`."""
        if self._history_epoch != self._lazy.history.history_epoch:
            self._history_epoch, self._at = self._lazy.history.history_epoch, Cursor()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._at < cursor:
                    self._moved.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_EVERY_S):
                            await self._moved.wait()
                    if self._at < cursor:
                        self._at = max(self._at, await self.cursor())
                return True
        return False

    async def reset(self) -> None:
        """Remove everything that follows from the log, and move the cursor to its beginning. Projectors
        of all processes are woken, and project the whole log again."""
        tables = ", ".join(table for kind, table in PUTS if kind is not PutSkippedEvent)
        async with self._lazy.acquire() as connection, connection.transaction():
            await connection.execute(SQL.variant("empty_tables", tables=tables))
            # Few rows, and a table that the role of processes must not truncate.
            await connection.execute(SQL["forget_skipped_events"], PROJECT)
            await connection.execute(SQL["forget_cursor"], PROJECT)
            await connection.execute(f"notify {News.LOG}")
        self._at = Cursor()


def _in_order(writes: Sequence[Write]) -> Iterator[Sequence[Write]]:
    """The writes in parts, so that a change of a deployment by its name comes after the writes before it
    and before those after it. Only logs of earlier releases have such changes."""
    part: list[Write] = []
    for write in writes:
        if isinstance(write, ChangeNamedDeployment):
            yield part
            yield [write]
            part = []
        else:
            part.append(write)
    yield part


async def _write(connection: Any, writes: Sequence[Write]) -> None:
    for kind, table in PUTS:
        if rows := [write for write in writes if type(write) is kind]:
            await connection.execute(_insert(kind, table), *_columns(kind, rows))
    for kind, table, key in CHANGES:
        if rows := _merge_by_key([write for write in writes if type(write) is kind], key):
            await connection.execute(_update(kind, table, key), *_columns(kind, rows))
    for kind, key, statements in DROPS:
        for write in writes:
            if type(write) is kind:
                for statement in statements:
                    await connection.execute(SQL[statement], getattr(write, key))
    for write in writes:
        if isinstance(write, ChangeNamedDeployment):
            change = (write.name, write.updated_at, write.request, write.error)
            await connection.execute(SQL["change_named_deployment"], *change)
    for write in writes:
        if isinstance(write, DropReplacedGroups):
            replaced = (write.evaluation, write.replacement)
            await connection.execute(SQL["drop_replaced_groups"], *replaced)
    if ended := [write for write in writes if isinstance(write, DropGivenSecrets)]:
        owners, times = [write.owner for write in ended], [write.at for write in ended]
        await connection.execute(SQL["drop_given_secrets"], owners, times)


async def _move(connection: Any, before: Cursor, after: Cursor) -> bool:
    if before == Cursor():
        await connection.execute(
            SQL["begin_cursor"],
            PROJECT,
            before.xid,
            before.position,
        )
    status = await connection.execute(
        SQL["move_cursor"],
        PROJECT,
        before.xid,
        before.position,
        after.xid,
        after.position,
    )
    return bool(status == "UPDATE 1")


def _names(kind: type[Write]) -> list[str]:
    return [field.name for field in fields(kind)]


def _columns(kind: type[Write], rows: Sequence[object]) -> list[list[Any]]:
    return [[_storable(getattr(row, name)) for row in rows] for name in _names(kind)]


def _storable(value: object) -> object:
    """Postgres text cannot hold NUL, and output of user code may contain it."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


def _arrays(names: Sequence[str]) -> str:
    types = (COLUMN_TYPES.get(name, "text") for name in names)
    return ", ".join(f"${n}::{kind}[]" for n, kind in enumerate(types, 1))


def _insert(kind: type[Write], table: str) -> str:
    names = _names(kind)
    return SQL.variant("put_rows", table=table, columns=", ".join(names), arrays=_arrays(names))


def _update(kind: type[Write], table: str, key: str) -> str:
    names = _names(kind)
    changes = ", ".join(f"{n} = coalesce(c.{n}, t.{n})" for n in names if n != key)
    return SQL.variant(
        "change_rows",
        table=table,
        key=key,
        columns=", ".join(names),
        arrays=_arrays(names),
        changes=changes,
    )


def _merge_by_key(changes: Sequence[Any], key: str) -> list[Any]:
    """One change per row. Of several changes, the last one with a value for a column wins."""
    merged: dict[str, Any] = {}
    for change in changes:
        identity = getattr(change, key)
        if identity in merged:
            values = {f.name: getattr(change, f.name) for f in fields(change)}
            given = {name: value for name, value in values.items() if value is not None}
            change = replace(merged[identity], **given)
        merged[identity] = change
    return list(merged.values())
