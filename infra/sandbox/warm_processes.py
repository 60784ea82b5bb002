"""The processes of user code that are kept warm: a bounded number of places, which hosts take in turn.

Only an idle process is ended to make room. When there is none, callers wait in the order in which they
came. A run that always has open calls would never be idle, so for each waiting host the process that has
had its place the longest takes no new calls, which then wait in turn as well.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from schemas.errors import TransientError


class EndingProcess(Protocol):
    """A process that may have ended."""

    @property
    def alive(self) -> bool: ...


P = TypeVar("P", bound=EndingProcess)


@dataclass(slots=True, eq=False)
class _Place(Generic[P]):
    process: P | None = None
    former: P | None = None
    num_calls: int = 0
    is_closed: bool = False
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True, eq=False)
class _Waiter(Generic[P]):
    key: Hashable
    place: "asyncio.Future[_Place[P]]"


class WarmProcesses(Generic[P]):
    """At most `most` processes, by the key of their host. `end` ends one of them."""

    def __init__(self, most: int, *, end: Callable[[P], Awaitable[None]]) -> None:
        self._most = most
        self._end = end
        self._places: dict[Hashable, _Place[P]] = {}
        self._idle: dict[Hashable, None] = {}
        self._waiting: deque[_Waiter[P]] = deque()

    @property
    def processes(self) -> list[P]:
        """The processes that are warm, those that have had their place the longest first."""
        return [place.process for place in self._places.values() if place.process is not None]

    @asynccontextmanager
    async def hold(self, key: Hashable, start: Callable[[], Awaitable[P]]) -> AsyncIterator[P]:
        """The process of a host, which is not ended before the block ends. It is started if there is
        none, as soon as there is a place for it. Raises what `start` raises."""
        place = await self._take(key)
        try:
            async with place.changing:
                yielded = await self._running(place, start)
            yield yielded
        finally:
            self._give_back(key, place)

    async def _running(self, place: _Place[P], start: Callable[[], Awaitable[P]]) -> P:
        """The process of a place, which is started if it is not running. The one before it is ended
        first, so that there are never more than there are places."""
        if place.process is not None and place.process.alive:
            return place.process
        for former in (place.former, place.process):
            if former is not None:
                await self._end(former)
        place.former, place.process = None, None
        place.process = await start()
        return place.process

    async def aclose(self) -> None:
        """End all processes. Callers that wait get a TransientError."""
        for waiter in self._waiting:
            if not waiter.place.done():
                waiter.place.set_exception(TransientError("this process is ending"))
        self._waiting.clear()
        places, self._places = list(self._places.values()), {}
        self._idle.clear()
        for place in places:
            for process in (place.former, place.process):
                if process is not None:
                    await self._end(process)

    async def _take(self, key: Hashable) -> _Place[P]:
        """A place with one more call."""
        waiter = _Waiter[P](key, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._serve()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled():
                self._give_back(key, waiter.place.result())
            else:
                waiter.place.cancel()
                self._serve()
            raise

    def _give_back(self, key: Hashable, place: _Place[P]) -> None:
        place.num_calls -= 1
        if not place.num_calls and self._places.get(key) is place:
            self._idle[key] = None
        self._serve()

    def _serve(self) -> None:
        """Let those in who can be, in their order, and close as many places as are still wanted."""
        self._waiting = deque(w for w in self._waiting if not w.place.done())
        for waiter in self._waiting:
            if waiter.key not in self._places and (made := self._make_place()) is not None:
                self._places[waiter.key] = made
        wanted = len({w.key for w in self._waiting if w.key not in self._places})
        busy = [place for place in self._places.values() if place.num_calls]
        for number, place in enumerate(busy):
            place.is_closed = number < wanted
        for waiter in self._waiting:
            found = self._places.get(waiter.key)
            if found is not None and not found.is_closed:
                found.num_calls += 1
                self._idle.pop(waiter.key, None)
                waiter.place.set_result(found)
        self._waiting = deque(w for w in self._waiting if not w.place.done())

    def _make_place(self) -> _Place[P] | None:
        """A new place, if there is room or a process is idle. The one that has been idle for the longest
        is ended before the new one starts."""
        if len(self._places) < self._most:
            return _Place()
        if not self._idle:
            return None
        key = next(iter(self._idle))
        del self._idle[key]
        former = self._places.pop(key)
        return _Place(former=former.process)
