"""The relay: publishes the log to Kafka, in the log's order, below the transaction horizon.

One instance is active. It holds an advisory lock on a connection of its own and saves its position on
the same connection, so a relay that has lost the lock cannot save anything. A frozen relay loses it
(`infra/spine/postgres/advisory_lock.py`). The position moves only after the broker has acknowledged
everything before it, so a crash at any point publishes some events again and loses none. A broker that
returns with an empty disk (another cluster, or recreated topics) receives the log again from the oldest
watermark, because nobody needs records below it. While there is no broker, the relay does nothing and
the reconciler keeps runs going.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from infra import failpoints
from infra.spine.bus.kafka.publisher import BrokerUnavailable, Forgotten, Publisher, Sent
from infra.spine.bus.tail_wait import TailWait
from infra.spine.ports.event_log import Cursor, LogTail
from infra.spine.postgres import advisory_lock
from infra.spine.postgres.advisory_lock import idle_timeout_ms
from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from infra.spine.postgres.history import HistoryChanged, as_of
from infra.spine.postgres.notify import Wakeup
from infra.task_cancellation import go_on, run_together
from schemas.envelope import EVENT_TYPES

logger = logging.getLogger(__name__)

PAGE = 500
PAUSE_S = 0.5
"""Pause between attempts to become the active relay, or to reach the database or the broker."""

CHECK_S = 5.0
"""How often the database session and the broker are checked, and the lag of the groups is recorded."""

LOCK = 0x52454C41
"""The advisory lock of the active relay ("RELA")."""

NAME = "kafka"

IN_FLIGHT = 8
"""How many pages may be on their way to the broker at the same time."""

Connect = Callable[[], AbstractAsyncContextManager[Publisher]]


@dataclass(frozen=True, slots=True)
class Position:
    """How far the log is published, to which cluster, and the end offsets that it acknowledged."""

    cursor: Cursor
    cluster: str
    ends: dict[str, int]


@dataclass(frozen=True, slots=True)
class PublishedPage:
    """Events that were handed to the broker, and the cursor after the last of them."""

    sent: Sent
    after: Cursor


class Leadership:
    """The right to publish: a database session that holds the advisory lock."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._using = asyncio.Lock()

    async def position(self) -> Position | None:
        """The position that the last relay saved; None if there was none."""
        async with self._using:
            row = await self._connection.fetchrow(
                "select cluster, ends, xid, position from relay where name = $1", NAME
            )
        if row is None:
            return None
        return Position(
            Cursor(row["xid"], row["position"]), row["cluster"], json.loads(row["ends"])
        )

    async def save_position(self, position: Position) -> None:
        """Save how far the log is published."""
        async with self._using:
            await self._connection.execute(
                "insert into relay (name, cluster, ends, xid, position) values ($1, $2, $3, $4, $5)"
                " on conflict (name) do update set cluster = excluded.cluster, ends = excluded.ends,"
                " xid = excluded.xid, position = excluded.position, seen_at = clock_timestamp()",
                NAME,
                position.cluster,
                json.dumps(position.ends),
                position.cursor.xid,
                position.cursor.position,
            )

    async def oldest_watermark(self, consumers: Sequence[str]) -> Cursor:
        """Return the cursor below which all of these consumers have consumed everything."""
        async with self._using:
            rows = await self._connection.fetch(
                "select xid, position from watermarks where consumer = any ($1)", list(consumers)
            )
        if len(rows) < len(consumers):
            return Cursor()
        return min((Cursor(row["xid"], row["position"]) for row in rows), default=Cursor())

    async def keep(self) -> None:
        """Say that this process runs, until the session is lost, and the lock with it. The server ends
        the session of a frozen process."""
        while True:
            await asyncio.sleep(advisory_lock.BEAT_S)
            async with self._using:
                await self._connection.execute("select 1")

    async def record_health(self, lags: Mapping[str, int]) -> None:
        """Record that the broker answers, and the lag of its groups. Raises what asyncpg raises when
        the session is lost, and the lock with it."""
        async with self._using:
            await self._connection.execute("update relay set seen_at = clock_timestamp()")
            await self._connection.execute("delete from bus_lag")
            await self._connection.executemany(
                "insert into bus_lag (consumers, records) values ($1, $2)", list(lags.items())
            )


class Relay:
    """Publishes the log whenever it is the active relay, until it is cancelled."""

    def __init__(
        self,
        database_url: str,
        log: LogTail,
        wakeup: Wakeup,
        *,
        connect: Connect,
        consumers: Sequence[str] = (),
    ) -> None:
        """`consumers` are the ones that read from the broker."""
        self._url = database_url
        self._consumers = consumers
        self._log = log
        self._tail_wait = TailWait(log, wakeup)
        self._connect = connect
        self._last_logged = ""
        self._forgotten = False
        self._at = Cursor()

    async def run(self) -> None:
        """Run until cancelled. Failures of the database or the broker lead to another attempt."""
        while True:
            await self._try_to_lead()
            go_on()
            await asyncio.sleep(PAUSE_S)

    async def _try_to_lead(self) -> None:
        try:
            async with acquire_leadership(self._url) as leadership:
                await run_together(self._lead(leadership), leadership.keep())
        except BrokerUnavailable as error:
            self._log_once(
                f"Kafka does not accept events ({error}); they stay in the log and are sent when it does"
            )
        except Forgotten as error:
            self._forgotten = True
            self._log_once(f"Kafka has lost records ({error}); they are sent again from the log")
        except UNAVAILABLE_ERRORS as error:
            self._log_once(f"the database is not available to the relay ({error}); trying again")

    async def _lead(self, leadership: Leadership) -> None:
        """Send pages and save the position behind them, until something fails."""
        async with self._connect() as publisher:
            history_epoch = self._log.history_epoch
            position = await self._start(leadership, publisher)
            self._log_once(
                f"the relay publishes to cluster {publisher.cluster} after {position.cursor}"
            )
            pages: asyncio.Queue[PublishedPage] = asyncio.Queue(IN_FLIGHT)
            await run_together(
                self._send(publisher, pages, position.cursor, history_epoch=history_epoch),
                self._move(leadership, publisher, pages),
                self._watch(leadership, publisher),
                self._watch_log_end(leadership, history_epoch),
            )

    async def _start(self, leadership: Leadership, publisher: Publisher) -> Position:
        """Return the position to continue from. It is an earlier one if this broker no longer holds what
        was published."""
        known = await leadership.position()
        if known is not None and not self._forgotten and _still_holds(publisher, known):
            return known
        oldest = await leadership.oldest_watermark(self._consumers)
        cursor = oldest if known is None else min(known.cursor, oldest)
        position = Position(cursor, publisher.cluster, dict(publisher.ends))
        await leadership.save_position(position)
        self._forgotten = False
        return position

    async def _send(
        self,
        publisher: Publisher,
        pages: "asyncio.Queue[PublishedPage]",
        cursor: Cursor,
        *,
        history_epoch: int,
    ) -> None:
        """Send the log page by page, a few pages ahead of the acknowledgements. A page that is not full
        ends at the horizon, so after it wait until there may be more events."""
        while True:
            self._at = cursor
            self._tail_wait.begin_read()
            with as_of(history_epoch):
                events, after = await self._log.tail(cursor, limit=PAGE)
            if after != cursor:
                failpoints.hit("relay.before_send")
                # Which topic an event of a newer release belongs to is unknown here. The reconciler of a
                # newer process finds it in the log.
                sent = await publisher.send([r for r in events if r.type in EVENT_TYPES])
                failpoints.hit("relay.after_send")
                await pages.put(PublishedPage(sent, after))
                cursor = after
            if len(events) < PAGE:
                await self._tail_wait.wait(cursor)

    async def _move(
        self, leadership: Leadership, publisher: Publisher, pages: "asyncio.Queue[PublishedPage]"
    ) -> None:
        """Save the position after each page once the broker holds it."""
        while True:
            page = await pages.get()
            await self.complete_page(leadership, publisher, page)
            failpoints.hit("relay.after_position")

    async def complete_page(
        self, leadership: Leadership, publisher: Publisher, page: PublishedPage
    ) -> None:
        """Wait until the broker holds a page, then save the position behind it."""
        await publisher.await_acknowledgements(page.sent)
        failpoints.hit("relay.after_ack")
        await leadership.save_position(
            Position(page.after, publisher.cluster, dict(publisher.ends))
        )

    async def _watch(self, leadership: Leadership, publisher: Publisher) -> None:
        """Notice that the broker or the leadership is lost, also while there is nothing to send."""
        while True:
            await asyncio.sleep(CHECK_S)
            await publisher.check()
            await leadership.record_health(await publisher.read_lags())

    async def _watch_log_end(self, leadership: Leadership, history_epoch: int) -> None:
        """Notice that the log now ends below what was published (a restored database), even if no
        connection failed. Raises HistoryChanged."""
        while True:
            await asyncio.sleep(CHECK_S)
            known, at = await leadership.position(), self._at
            with as_of(history_epoch):
                there = await self._log.reaches(at)
            if not there and (known is None or known.cursor < at):
                raise HistoryChanged

    def _log_once(self, message: str) -> None:
        """Log a message unless it was the last one: attempts repeat often."""
        if message != self._last_logged:
            logger.warning("%s", message)
        self._last_logged = message


def _still_holds(publisher: Publisher, known: Position) -> bool:
    """Whether this broker still holds everything that was published."""
    return known.cluster == publisher.cluster and all(
        publisher.ends.get(place, 0) >= end for place, end in known.ends.items()
    )


@asynccontextmanager
async def acquire_leadership(url: str) -> AsyncIterator[Leadership]:
    """Wait until no other relay leads, then lead inside the block. Leaving gives it up."""
    connection = await asyncpg.connect(
        url,
        timeout=10,
        command_timeout=10,
        server_settings={
            "application_name": "headrace relay",
            "synchronous_commit": "off",
            "idle_session_timeout": str(idle_timeout_ms()),
            "tcp_keepalives_idle": "5",
            "tcp_keepalives_interval": "2",
            "tcp_keepalives_count": "3",
        },
    )
    try:
        while not await connection.fetchval("select pg_try_advisory_lock($1)", LOCK):  # noqa: ASYNC110 - no event can come from another machine
            await asyncio.sleep(PAUSE_S)
        yield Leadership(connection)
    finally:
        connection.terminate()
