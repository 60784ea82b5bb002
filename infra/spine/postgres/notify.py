"""Wake-ups between processes: one coalesced NOTIFY after a commit, and a listener.

A lost wake-up costs one slow poll and never loses work, because every waiter also polls by itself.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Iterable
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from infra.spine.postgres.pool import CONNECT_S, Database, open_session
from infra.task_cancellation import end, go_on

COALESCE_S = 0.005
"""At most one NOTIFY per process in this time."""

PROBE_S = 15.0
"""How often the listener's connection is probed. One that a network dropped would stay
silent."""


class News(StrEnum):
    """The subject of a notification. Each kind has its own channel, so that workers do not search for
    effects each time an event is appended."""

    LOG = "headrace"
    """The log has grown."""

    WORK = "headrace_work"
    """There may be effects to claim: new ones, or those of a run whose gate moved."""


class Wakeup:
    """A flag that many callers may set and one caller waits for. `absences` counts how often the
    database was unavailable. After each time, rows that were written without waiting for the disk may be
    lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.absences = 0

    def set(self) -> None:
        self._event.set()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def clear(self) -> None:
        self._event.clear()

    async def wait(self, timeout_s: float) -> bool:
        """Return once it is set (and clear it), or after `timeout_s` seconds. Says whether it was set.
        Raises CancelledError at once if the task was cancelled."""
        go_on()
        await _within(self._event, timeout_s)
        was_set = self.is_set
        self.clear()
        return was_set


class Notifier:
    """Sends and receives wake-ups over one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[News, list[Wakeup]] = {news: [] for news in News}
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._pending: set[News] = set()

    async def __aenter__(self) -> Self:
        self._listener = asyncio.ensure_future(self._listen())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tasks = [task for task in (self._listener, self._sender) if task is not None]
        await end(tasks)

    def subscribe(self, news: News = News.LOG) -> Wakeup:
        """Return a wake-up that every notification of this kind sets from now on."""
        wakeup = Wakeup()
        self._waiting[news].append(wakeup)
        return wakeup

    def ping(self, news: Iterable[News]) -> None:
        """Wake the other processes soon. Many pings in a short time become one NOTIFY."""
        for one in news:
            self.wake(one)
            self._pending.add(one)
        if self._pending and (self._sender is None or self._sender.done()):
            self._sender = asyncio.ensure_future(self._send())

    def wake(self, news: News) -> None:
        """Wake the subscribers in this process."""
        for wakeup in self._waiting[news]:
            wakeup.set()

    def _back(self) -> None:
        """Wake all subscribers, because this process listens again and may have missed notifications."""
        for wakeup in itertools.chain(*self._waiting.values()):
            wakeup.absences += 1
            wakeup.set()

    async def _send(self) -> None:
        while self._pending:
            news_to_send, self._pending = self._pending, set()
            go_on()
            with contextlib.suppress(*UNAVAILABLE_ERRORS):
                await self._database.lazy.execute(
                    ";".join(f"notify {news}" for news in news_to_send)
                )
            await asyncio.sleep(COALESCE_S)

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(*UNAVAILABLE_ERRORS):
                await self._listen_once()
            go_on()
            await asyncio.sleep(1.0)

    async def _listen_once(self) -> None:
        connection = await open_session(self._database.url, "headrace listens")
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        own = connection.get_server_pid()

        def on_notify(_: Any, pid: int, channel: str, __: object) -> None:
            if pid != own:
                self.wake(News(channel))

        try:
            for news in News:
                await connection.add_listener(news, on_notify)
            self._back()
            while not await _within(lost, PROBE_S):
                await connection.execute("select", timeout=CONNECT_S)
        finally:
            connection.terminate()


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event for at most `timeout_s`. Returns whether it came."""
    with contextlib.suppress(TimeoutError):
        # Not wait_for: on Python 3.11 it may swallow a cancellation that comes with the event.
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
