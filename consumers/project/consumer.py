"""Projects every event into the tables that the API and the dashboard read.
Reads: every event.  Emits: nothing.  Stream: none; it tails the log with a cursor of its own.
Does: turns events into rows; a batch and the cursor are one commit.  Waits for: nothing.
Safe to repeat because: the cursor moves with the rows, and writing an existing row changes nothing.

An event that cannot be turned into rows does not stop the others. It is recorded in the table
`skipped_events`, in the same commit, until the read model is rebuilt (`headrace rebuild`). An event of a
newer release is projected soon by a projector of that release."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from consumers.project.cost_rows import cost_rows
from consumers.project.event_rows import rows
from consumers.project.log_lines import narrate
from consumers.project.model_rows import deployment_rows, hub_rows
from consumers.project.push_rows import push_rows
from infra.readmodel.rows import (
    ChangeLetter,
    DropSkippedEvent,
    PutEvaluation,
    PutLetter,
    PutSkippedEvent,
    Write,
)
from infra.readmodel.store import PROJECT, RowsRefused
from infra.spine.ports.event_log import Cursor, EventLog, Recorded
from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from infra.spine.postgres.notify import Wakeup
from infra.spine.runtime.error_excerpt import excerpt
from infra.task_cancellation import go_on
from schemas.envelope import NewerEvent
from schemas.events import (
    ArtifactWithdrawn,
    DatasetDeleted,
    MessageDeadLettered,
    MessageRedriven,
    RunArchived,
    RunDeleted,
    RunRestored,
)
from schemas.ids import StreamName

logger = logging.getLogger(__name__)

BATCH = 500
SLOW_POLL_S = 5.0

LEFT_S = 5.0
"""How often the projector looks for events that one of an older release has left."""

TURNS = frozenset(
    kind.type for kind in (RunArchived, RunRestored, RunDeleted, DatasetDeleted, ArtifactWithdrawn)
)
"""Events after which rows are deleted or come back."""


class Tables(Protocol):
    """The tables of the read model (`infra.readmodel.store.ReadModel`)."""

    async def cursor(self) -> Cursor: ...
    async def left_for_newer(self) -> Sequence[tuple[StreamName, int]]: ...
    async def apply(self, writes: list[Write], *, before: Cursor, after: Cursor) -> bool: ...
    async def reset(self) -> None: ...


class Wakeups(Protocol):
    """Signals that the log has grown (`infra.spine.postgres.notify.Notifier`)."""

    def subscribe(self) -> Wakeup: ...


class Projector:
    """Keeps the tables up to date with the log, until it is cancelled."""

    def __init__(self, log: EventLog, readmodel: Tables, *, wakeups: Wakeups | None = None) -> None:
        self._log = log
        self._tables = readmodel
        self._wakeup = wakeups.subscribe() if wakeups else Wakeup()
        self._left_at = -LEFT_S

    async def run(self) -> None:
        """Project new events until cancelled. A lost wake-up only delays the next batch until the slow
        poll. The same holds when the database does not answer, because the cursor says where to
        continue."""
        while True:
            if await self._try_step() == 0:
                await self._await_news()

    async def _await_news(self) -> None:
        """Wait for a wake-up in a separate task. `asyncio.wait_for` of Python 3.11 can lose a
        cancellation that comes together with the wake-up, and then this loop would never end."""
        waiting = asyncio.ensure_future(self._wakeup.wait(SLOW_POLL_S))
        try:
            await asyncio.wait({waiting})
        finally:
            waiting.cancel()

    async def _try_step(self) -> int:
        try:
            return await self.step()
        except UNAVAILABLE_ERRORS as error:
            go_on()
            logger.warning("the read model cannot be updated until the database answers: %s", error)
            return 0

    async def step(self) -> int:
        """Project one batch. Returns how many events it held; 0 if nothing is new below the horizon."""
        if time.monotonic() >= self._left_at + LEFT_S:
            await self._project_left()
            self._left_at = time.monotonic()
        before = await self._tables.cursor()
        events, after = await self._log.tail(before, limit=BATCH)
        if after == before:
            return 0
        events, after = _until_turn(events, after)
        if events and events[0].type == RunRestored.type:
            await self._project_again(events[0].run, before)
        if not await self._apply(events, before=before, after=after):
            logger.info("another process projects the events after %s", before)
        return max(1, len(events))

    async def _apply(self, events: Sequence[Recorded], *, before: Cursor, after: Cursor) -> bool:
        """Write the rows of these events and move the cursor. When the database refuses a row, the batch
        is halved until the event is found whose row it is, and that event is recorded as skipped.
        Returns False when another process has moved the cursor."""
        try:
            writes = [write for recorded in events for write in writes_of(recorded)]
            return await self._tables.apply(writes, before=before, after=after)
        except RowsRefused as error:
            if not events:
                raise
            if len(events) == 1:
                skipped: list[Write] = [_skip(events[0], error)]
                return await self._tables.apply(skipped, before=before, after=after)
        half = len(events) // 2
        between = after if before == after else events[half - 1].cursor
        return await self._apply(events[:half], before=before, after=between) and await self._apply(
            events[half:], before=between, after=after
        )

    async def _project_left(self) -> None:
        """Project the runs whose events an older release skipped, if this release knows these events."""
        places = await self._tables.left_for_newer()
        if not places:
            return
        cursor = await self._tables.cursor()
        known = await self._log.events_at(places)
        for run in dict.fromkeys(recorded.run for recorded in known):
            await self._project_again(run, cursor)
        drops: list[Write] = [DropSkippedEvent(str(recorded.id)) for recorded in known]
        if drops:
            await self._tables.apply(drops, before=cursor, after=cursor)

    async def _project_again(self, run: str, cursor: Cursor) -> None:
        """Project the events of a restored run, which lie far below the cursor. Putting a row that
        exists changes nothing, and the last change wins, so a repeat is harmless."""
        owners = [run]
        for owner in owners:
            after = Cursor()
            while page := await self._log.read(owner, after=after, limit=BATCH):
                events = [r for r in page if r.type not in TURNS]
                await self._apply(events, before=cursor, after=cursor)
                writes = [write for recorded in events for write in writes_of(recorded)]
                owners += [w.evaluation for w in writes if isinstance(w, PutEvaluation) and w.run]
                after = page[-1].cursor

    async def rebuild(self) -> int:
        """Empty the tables and project the whole log again. Returns the number of events."""
        await self._tables.reset()
        total = 0
        while count := await self.step():
            total += count
        return total


def _until_turn(events: Sequence[Recorded], after: Cursor) -> tuple[Sequence[Recorded], Cursor]:
    """Return the events before the first one that deletes or restores rows (or only that event, if it
    comes first), and the cursor behind them. The split is needed because a batch writes all its rows
    before it deletes any, whatever their order in the log."""
    turn = next((n for n, recorded in enumerate(events) if recorded.type in TURNS), None)
    if turn is None:
        return events, after
    part = events[: max(1, turn)]
    return part, part[-1].cursor


def writes_of(recorded: Recorded) -> tuple[Write, ...]:
    """Return the writes of an event. If its projection raises, Headrace has a bug or does not know the
    payload. The event is then recorded as skipped, and the events around it are still projected."""
    try:
        return project(recorded)
    except NewerEvent as error:
        logger.warning("the read model leaves %s for a newer release: %s", recorded.id, error)
        return (_skipped_event(recorded, error),)
    except Exception as error:  # as said above
        return (_skip(recorded, error),)


def _skip(recorded: Recorded, error: Exception) -> Write:
    logger.error(
        "the read model skips %s %s; correct the cause, then run `headrace rebuild`",
        recorded.type,
        recorded.id,
        exc_info=error,
    )
    return _skipped_event(recorded, error)


def _skipped_event(recorded: Recorded, error: Exception) -> PutSkippedEvent:
    return PutSkippedEvent(
        projection=PROJECT,
        event=str(recorded.id),
        run=recorded.run,
        event_type=recorded.type,
        stream=recorded.stream,
        version=recorded.version,
        xid=recorded.cursor.xid,
        position=recorded.cursor.position,
        error=excerpt(f"{type(error).__name__}: {error}"),
        at=recorded.time,
    )


def project(recorded: Recorded) -> tuple[Write, ...]:
    """Return the writes of one event, log lines and dead letters included. Raises what its projection
    raises."""
    return (
        *rows(recorded.event, recorded.time),
        *cost_rows(recorded),
        *push_rows(recorded),
        *_letter_rows(recorded),
        *deployment_rows(recorded),
        *hub_rows(recorded),
        *narrate(recorded),
    )


def _letter_rows(recorded: Recorded) -> tuple[Write, ...]:
    """The row of a new dead letter, or the change to an existing row; nothing for other events."""
    match recorded.event:
        case MessageDeadLettered() as event:
            put = PutLetter(
                letter=str(recorded.id),
                version=recorded.version,
                consumer=event.consumer,
                message_type=event.message_type,
                about=event.about,
                cause=event.cause,
                pauses=event.pauses,
                created_at=recorded.time,
            )
            return (put,)
        case MessageRedriven() as event:
            return (ChangeLetter(str(event.letter), redriven_at=recorded.time),)
        case _:
            return ()
