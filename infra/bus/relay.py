"""The relay: publishes the log to Kafka, in the log's order, below the transaction horizon.

One instance is active: it holds an advisory lock on a connection of its own, and moves its position on
that same connection, so who has lost the lock moves nothing. The position moves only after the broker
acknowledged what lies before it: a crash anywhere publishes some events again, and loses none. A broker
that came back with an empty disk (another cluster, or topics made again) is published to again from
the oldest watermark, for below it nobody needs a record. While there is no broker at all, nothing
happens here, and the reconciler keeps runs going.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from infra import failpoints
from infra.bus.kafka.publisher import BrokerAway, Forgotten, Publisher, Sent
from infra.bus.tail_wait import Patience
from infra.ports.event_log import Cursor, LogTail
from infra.postgres.errors import UNAVAILABLE_ERRORS
from infra.postgres.history import Turned, as_of
from infra.postgres.notify import Wakeup
from infra.task_cancellation import end, go_on

logger = logging.getLogger(__name__)

PAGE = 500
PAUSE_S = 0.5
"""Between attempts to become the active relay, or to reach a database or a broker that is away."""

CHECK_S = 5.0
"""The session and the broker are asked this often whether they still are what they were, and how far
the groups are behind."""

LOCK = 0x52454C41
"""The advisory lock of the active relay ("RELA")."""

NAME = "kafka"

IN_FLIGHT = 8
"""Pages that may be on their way to the broker at once."""

Connect = Callable[[], AbstractAsyncContextManager[Publisher]]


@dataclass(frozen=True, slots=True)
class Position:
    """Up to where the log is published, to which cluster, and what that had acknowledged."""

    cursor: Cursor
    cluster: str
    ends: dict[str, int]


@dataclass(frozen=True, slots=True)
class Page:
    """Events that were handed to the broker, and where the log goes on behind them."""

    sent: Sent
    after: Cursor


class Seat:
    """The right to publish: a database session that holds the lock."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._using = asyncio.Lock()

    async def position(self) -> Position | None:
        """Where the last relay got to, if there was one."""
        async with self._using:
            row = await self._connection.fetchrow(
                "select cluster, ends, xid, position from relay where name = $1", NAME
            )
        if row is None:
            return None
        return Position(
            Cursor(row["xid"], row["position"]), row["cluster"], json.loads(row["ends"])
        )

    async def move(self, position: Position) -> None:
        """Remember it."""
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
        """Below it all of these have consumed everything."""
        rows = await self._connection.fetch(
            "select xid, position from watermarks where consumer = any ($1)", list(consumers)
        )
        if len(rows) < len(consumers):
            return Cursor()
        return min((Cursor(row["xid"], row["position"]) for row in rows), default=Cursor())

    async def saw(self, lags: Mapping[str, int]) -> None:
        """The broker is well, and its groups are so far behind. Raises what asyncpg raises when the
        session, and with it the lock, is lost."""
        async with self._using:
            await self._connection.execute("update relay set seen_at = clock_timestamp()")
            await self._connection.execute("delete from bus_lag")
            await self._connection.executemany(
                "insert into bus_lag (consumers, records) values ($1, $2)", list(lags.items())
            )


class Relay:
    """Publishes for ever, whenever it is the active one."""

    def __init__(
        self,
        database_url: str,
        log: LogTail,
        wakeup: Wakeup,
        *,
        connect: Connect,
        consumers: Sequence[str] = (),
    ) -> None:
        """`consumers` are those that read from the broker."""
        self._url = database_url
        self._consumers = consumers
        self._log = log
        self._patience = Patience(log, wakeup)
        self._connect = connect
        self._said = ""
        self._forgotten = False
        self._at = Cursor()

    async def run(self) -> None:
        """Until cancelled; goes on through the death of the database and of the broker."""
        while True:
            await self._tried()
            go_on()
            await asyncio.sleep(PAUSE_S)

    async def _tried(self) -> None:
        try:
            async with seated(self._url) as seat:
                await self._lead(seat)
        except BrokerAway as error:
            self._say(f"Kafka does not take events: {error}; they wait in the log")
        except Forgotten as error:
            self._forgotten = True
            self._say(f"Kafka has lost what it held: {error}; it is sent again")
        except UNAVAILABLE_ERRORS as error:
            self._say(f"the relay waits for the database: {error}")

    async def _lead(self, seat: Seat) -> None:
        """Send pages and move behind them, until something fails."""
        async with self._connect() as publisher:
            turn = self._log.turns
            position = await self._start(seat, publisher)
            self._say(f"the relay publishes to cluster {publisher.cluster} after {position.cursor}")
            pages: asyncio.Queue[Page] = asyncio.Queue(IN_FLIGHT)
            await _all(
                self._send(publisher, pages, position.cursor, turn=turn),
                self._move(seat, publisher, pages),
                self._watch(seat, publisher),
                self._reaches(seat, turn),
            )

    async def _start(self, seat: Seat, publisher: Publisher) -> Position:
        """Where to go on: further back when this broker does not hold what was published."""
        known = await seat.position()
        if known is not None and not self._forgotten and _holds(publisher, known):
            return known
        oldest = await seat.oldest_watermark(self._consumers)
        cursor = oldest if known is None else min(known.cursor, oldest)
        position = Position(cursor, publisher.cluster, dict(publisher.ends))
        await seat.move(position)
        self._forgotten = False
        return position

    async def _send(
        self, publisher: Publisher, pages: "asyncio.Queue[Page]", cursor: Cursor, *, turn: int
    ) -> None:
        """Hand the log over, page by page, a few pages ahead of what is acknowledged. Behind a page
        that was not full there is nothing below the horizon; whether there is above, patience asks."""
        while True:
            self._at = cursor
            self._patience.look()
            with as_of(turn):
                events, after = await self._log.tail(cursor, limit=PAGE)
            if after != cursor:
                failpoints.hit("relay.before_send")
                sent = await publisher.send(events)
                failpoints.hit("relay.after_send")
                await pages.put(Page(sent, after))
                cursor = after
            if len(events) < PAGE:
                await self._patience.wait(cursor)

    async def _move(self, seat: Seat, publisher: Publisher, pages: "asyncio.Queue[Page]") -> None:
        """Move the position behind each page once the broker holds it."""
        while True:
            page = await pages.get()
            await self.passed(seat, publisher, page)
            failpoints.hit("relay.after_position")

    async def passed(self, seat: Seat, publisher: Publisher, page: Page) -> None:
        """The broker holds a page, and then the position says so."""
        await publisher.acknowledged(page.sent)
        failpoints.hit("relay.after_ack")
        await seat.move(Position(page.after, publisher.cluster, dict(publisher.ends)))

    async def _watch(self, seat: Seat, publisher: Publisher) -> None:
        """Find out that the broker or the seat is lost while there is nothing to send."""
        while True:
            await asyncio.sleep(CHECK_S)
            await publisher.check()
            await seat.saw(await publisher.lags())

    async def _reaches(self, seat: Seat, turn: int) -> None:
        """Find out that the log ends below what it had published, though no connection said so. Raises
        Turned."""
        while True:
            await asyncio.sleep(CHECK_S)
            known, at = await seat.position(), self._at
            with as_of(turn):
                there = await self._log.reaches(at)
            if not there and (known is None or known.cursor < at):
                raise Turned

    def _say(self, message: str) -> None:
        """Once, not at every attempt."""
        if message != self._said:
            logger.warning("%s", message)
        self._said = message


async def _all(*jobs: Coroutine[Any, Any, None]) -> None:
    """Run these together; raises what the first of them raises, and ends the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await end(tasks)
    for task in done:
        task.result()


def _holds(publisher: Publisher, known: Position) -> bool:
    """Whether this broker holds all that was published."""
    return known.cluster == publisher.cluster and all(
        publisher.ends.get(place, 0) >= end for place, end in known.ends.items()
    )


@asynccontextmanager
async def seated(url: str) -> AsyncIterator[Seat]:
    """The seat, once no other relay has it. Leaving gives it up."""
    connection = await asyncpg.connect(
        url,
        timeout=10,
        command_timeout=10,
        server_settings={
            "application_name": "headrace relay",
            "synchronous_commit": "off",
            "tcp_keepalives_idle": "5",
            "tcp_keepalives_interval": "2",
            "tcp_keepalives_count": "3",
        },
    )
    try:
        while not await connection.fetchval("select pg_try_advisory_lock($1)", LOCK):  # noqa: ASYNC110 - no event can come from another machine
            await asyncio.sleep(PAUSE_S)
        yield Seat(connection)
    finally:
        connection.terminate()
