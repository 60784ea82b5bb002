"""The read model on Postgres: what the projector writes, and the doors to what the API reads.

A batch and the cursor that it moves are one transaction, so a crash never shows half a batch or
counts one twice; the commit need not wait for the disk, for the log can always say it again. All
but names, uploads and doors (edge tables) is a function of the log: `reset`, then project anew.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from infra.ports.event_log import Cursor
from infra.postgres.names import PostgresNames
from infra.postgres.notify import News
from infra.postgres.pool import Database
from infra.readmodel.dead_letters import Letters
from infra.readmodel.platform import Doors, Platform
from infra.readmodel.registry import Evaluations, Registry, Uploads
from infra.readmodel.rows import (
    ChangeEvaluation,
    ChangeLetter,
    ChangeRun,
    ChangeWorkspace,
    DropDataset,
    DropHistory,
    DropRun,
    PutCheckpoint,
    PutDataset,
    PutEvaluation,
    PutGroup,
    PutLetter,
    PutLog,
    PutMetric,
    PutRun,
    PutSkippedEvent,
    PutWorkspace,
    Unarchive,
    Write,
)
from infra.readmodel.runs import Runs
from infra.readmodel.skipped_events import SkippedEvents
from infra.readmodel.wait_facts import Waits
from schemas.ids import ConsumerName, WorkerId

PROJECT = ConsumerName("project")
"""The watermark that is the read model's cursor."""

PUTS: tuple[tuple[type[Write], str], ...] = (
    (PutRun, "runs"),
    (PutDataset, "datasets"),
    (PutWorkspace, "workspaces"),
    (PutEvaluation, "evaluations"),
    (PutMetric, "metric_points"),
    (PutCheckpoint, "checkpoints"),
    (PutGroup, "graded_groups"),
    (PutLog, "log_lines"),
    (PutLetter, "dead_letters"),
    (PutSkippedEvent, "skipped_events"),
)
CHANGES: tuple[tuple[type[Write], str, str], ...] = (
    (ChangeRun, "runs", "run"),
    (ChangeWorkspace, "workspaces", "workspace"),
    (ChangeEvaluation, "evaluations", "evaluation"),
    (ChangeLetter, "dead_letters", "letter"),
)

LINES = """delete from log_lines l
where (l.run = $1 or l.run in (select evaluation from evaluations where run = $1)) and not exists (
  select from events e where e.xid = l.xid::text::xid8 and e.position = l.position)"""
SKIPPED = """delete from skipped_events s
where (s.run = $1 or s.run in (select evaluation from evaluations where run = $1)) and not exists (
  select from events e where e.xid = s.xid::text::xid8 and e.position = s.position)"""
GROUPS = """delete from graded_groups
where owner = $1 or owner in (select evaluation from evaluations where run = $1)"""
HISTORY = (
    LINES,
    SKIPPED,
    GROUPS,
    "delete from evaluations where run = $1",
    "delete from metric_points where run = $1",
)
DROPS: tuple[tuple[type[Write], str, tuple[str, ...]], ...] = (
    (DropHistory, "run", HISTORY),
    (
        DropRun,
        "run",
        (
            *HISTORY,
            "delete from log_lines where run = $1",
            "delete from checkpoints where run = $1",
            "delete from runs where run = $1",
        ),
    ),
    (DropDataset, "dataset", ("delete from datasets where dataset = $1",)),
    (Unarchive, "run", (LINES, "update runs set archived_at = null where run = $1")),
)
"""What is forgotten because its events left the log: the last thing that a batch does."""

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
    "total_steps": "integer",
    "xid": "bigint",
    "position": "bigint",
    "file_size": "bigint",
    "reward": "double precision",
    "value": "double precision",
    "at": "timestamptz",
    "created_at": "timestamptz",
    "started_at": "timestamptz",
    "completed_at": "timestamptz",
    "updated_at": "timestamptz",
    "last_at": "timestamptz",
    "redriven_at": "timestamptz",
    "archived_at": "timestamptz",
    "restored_at": "timestamptz",
    "version": "integer",
    "pauses": "boolean",
}
"""Columns that are not text."""

W = TypeVar("W")


class ReadModel:
    """Applies writes; `runs`, `registry`, `evaluations`, `platform`, `letters`, `skipped_events` and
    `waits` answer."""

    def __init__(self, database: Database) -> None:
        self._lazy = database.lazy
        self._moved = asyncio.Event()
        self._at = Cursor()
        self._turn = 0
        self.names = PostgresNames(database)
        self.runs = Runs(database)
        self.registry = Registry(database)
        self.evaluations = Evaluations(database)
        self.uploads = Uploads(database)
        self.doors = Doors(database)
        self.platform = Platform(database)
        self.letters = Letters(database)
        self.skipped_events = SkippedEvents(database, PROJECT)
        self.waits = Waits(database)

    async def cursor(self) -> Cursor:
        """Up to where the log is projected."""
        row = await self._lazy.fetchrow(
            "select xid, position from watermarks where consumer = $1", PROJECT
        )
        return Cursor(row["xid"], row["position"]) if row else Cursor()

    async def apply(self, writes: Sequence[Write], *, before: Cursor, after: Cursor) -> bool:
        """Write a batch and move the cursor from `before` to `after`. False, with nothing written,
        when the cursor stands elsewhere: another process projects too."""
        async with self._lazy.acquire() as connection, connection.transaction():
            if not await _move(connection, before, after):
                return False
            for kind, table in PUTS:
                if rows := [write for write in writes if type(write) is kind]:
                    await connection.execute(_insert(kind, table), *_columns(kind, rows))
            for kind, table, key in CHANGES:
                if rows := _merged([write for write in writes if type(write) is kind], key):
                    await connection.execute(_update(kind, table, key), *_columns(kind, rows))
            for kind, key, statements in DROPS:
                for write in writes:
                    if type(write) is kind:
                        for statement in statements:
                            await connection.execute(statement, getattr(write, key))
        self._at = after
        self._moved.set()
        return True

    async def caught_up(self, cursor: Cursor, *, timeout_s: float = 2.0) -> bool:
        """Wait until everything up to `cursor` is projected, so that who wrote can read it."""
        if self._turn != self._lazy.history.turns:
            self._turn, self._at = self._lazy.history.turns, Cursor()
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
        """Forget everything that follows from the log, and move the cursor to its beginning. Projectors
        of all processes are woken, and project the whole log again."""
        tables = ", ".join(table for kind, table in PUTS if kind is not PutSkippedEvent)
        async with self._lazy.acquire() as connection, connection.transaction():
            await connection.execute(f"truncate {tables}")
            # Few rows, and a table that the role of processes must not truncate.
            await connection.execute("delete from skipped_events where projection = $1", PROJECT)
            await connection.execute("delete from watermarks where consumer = $1", PROJECT)
            await connection.execute(f"notify {News.LOG}")
        self._at = Cursor()


async def announce_door(database: Database, worker: WorkerId, url: str, key: str) -> None:
    """Tell the API where this worker's engine answers, and the key it asks for."""
    await Doors(database).announce(worker, url, key)


async def _move(connection: Any, before: Cursor, after: Cursor) -> bool:
    if before == Cursor():
        await connection.execute(
            "insert into watermarks (consumer, xid, position) values ($1, $2, $3)"
            " on conflict do nothing",
            PROJECT,
            before.xid,
            before.position,
        )
    status = await connection.execute(
        "update watermarks set xid = $4, position = $5"
        " where consumer = $1 and xid = $2 and position = $3",
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
    """Postgres has no NUL in text; what user code says may hold one."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


def _unnest(names: Sequence[str]) -> str:
    types = (COLUMN_TYPES.get(name, "text") for name in names)
    return f"unnest({', '.join(f'${n}::{kind}[]' for n, kind in enumerate(types, 1))})"


def _insert(kind: type[Write], table: str) -> str:
    names = _names(kind)
    return (
        f"insert into {table} ({', '.join(names)}) select * from {_unnest(names)}"  # noqa: S608 - names of our classes' fields
        " on conflict do nothing"
    )


def _update(kind: type[Write], table: str, key: str) -> str:
    names = _names(kind)
    changes = ", ".join(f"{n} = coalesce(c.{n}, t.{n})" for n in names if n != key)
    return (
        f"update {table} t set {changes} from {_unnest(names)} as c ({', '.join(names)})"  # noqa: S608 - names of our classes' fields
        f" where t.{key} = c.{key}"
    )


def _merged(changes: Sequence[Any], key: str) -> list[Any]:
    """One change per row: of several, the last that says something about a column stands."""
    merged: dict[str, Any] = {}
    for change in changes:
        identity = getattr(change, key)
        if identity in merged:
            said = {f.name: getattr(change, f.name) for f in fields(change)}
            news = {name: value for name, value in said.items() if value is not None}
            change = replace(merged[identity], **news)
        merged[identity] = change
    return list(merged.values())
