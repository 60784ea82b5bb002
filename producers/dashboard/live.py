"""New points of curves, for the viewers of a run.

A run is read once for all its viewers, and only while it has any. Each viewer gets the same bytes. One
that reads too slowly loses its stream.

The id of a message is the newest step that its viewer knows then. A browser whose stream broke, because
it slept or the server was restarted, sends that id when it connects again, and gets what it missed.
"""

import asyncio
import contextlib
import json
import logging
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from infra.ports.actor import Actor, acting_as
from infra.rate_limited_log import RateLimit
from infra.readmodel.runs import RunJson, Runs
from infra.spine.ports.clock import Clock
from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from producers.core.history.metric_titles import VALIDATION
from producers.dashboard import formats
from producers.dashboard.charts import finite_points, thin
from producers.dashboard.pages.run import DRAWN, ENDED, INTERVAL, figures_of, state_of
from producers.dashboard.pages.runs import progress, progress_text, times_left
from producers.dashboard.routing import PageRoute
from producers.http.auth import is_still_valid
from producers.http.browsers import bearer_of, cookie_name, cookie_of
from producers.http.routes.runs import find_run, services
from schemas.errors import TransientError

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())

EVERY_S = 0.5
FIGURES_EVERY_S = 5.0
"""How often the figures of a run are sent in which nothing happens, because its duration grows."""

COMMENT_EVERY_S = 15.0
SESSION_CHECKED_S = 15.0
"""How long a stream may go on after its session has ended. A revoked API key ends it at once."""

MOST_WAITING = 32
"""How many messages may wait for a viewer."""

MOST_VIEWERS = 2000
MISSED_POINTS = 600
"""Points of a curve for a browser that missed more: the first, the last and the extremes."""

MISSED_READS = 50
"""How often at most points that a browser missed are read; each read gets up to 2,000 per curve."""

AT_END = "end"
EVENTS = "text/event-stream"
STEP_ID = re.compile(r"([0-9]{1,9})(-end)?")


@dataclass(eq=False)
class _Feed:
    """A run that somebody views. `last` is the newest step that was sent, by metric."""

    run: str
    viewers: set[asyncio.Queue[bytes | None]] = field(default_factory=set)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    last: dict[str, int] = field(default_factory=dict)
    shown: Mapping[str, object] = field(default_factory=dict)
    reading: asyncio.Task[None] | None = None
    figures_at: float = -math.inf

    def send(self, message: bytes | None) -> None:
        for viewer in tuple(self.viewers):
            if viewer.full():
                self.viewers.discard(viewer)
                viewer.get_nowait()
                viewer.put_nowait(None)
            else:
                viewer.put_nowait(message)


class LiveRuns:
    """The runs that are viewed now."""

    def __init__(self, runs: Runs, *, clock: Clock, every_s: float = EVERY_S) -> None:
        self._runs = runs
        self._clock = clock
        self._every_s = every_s
        self._feeds: dict[str, _Feed] = {}

    @property
    def num_viewers(self) -> int:
        return sum(len(feed.viewers) for feed in self._feeds.values())

    @property
    def num_runs(self) -> int:
        return len(self._feeds)

    def send(self, run: str, message: bytes) -> None:
        """Send a message to the viewers of a run (its id)."""
        if run in self._feeds:
            self._feeds[run].send(message)

    async def messages(
        self, run: str, keys: Sequence[str], *, known: int | None = None
    ) -> AsyncGenerator[bytes | None, None]:
        """Yield server-sent events about a run (its id) and these metrics until it ends; None at first,
        and from time to time when there are none. Of the points that exist before the first None, only
        those from the step `known` on are sent; none, if it is None."""
        feed = self._feeds.setdefault(run, _Feed(run))
        viewer: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)
        feed.viewers.add(viewer)
        if feed.reading is None:
            feed.reading = asyncio.ensure_future(self._read(feed, keys))
        try:
            await feed.has_begun.wait()
            yield None
            if known is not None:
                yield await self.read_missed(run, keys, known)
            while True:
                message: bytes | None = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(COMMENT_EVERY_S):
                        message = await viewer.get()
                    if message is None:
                        return
                yield message
        finally:
            feed.viewers.discard(viewer)
            if not feed.viewers:
                self._forget(feed)
                feed.reading.cancel()

    async def read_missed(
        self, run: str, keys: Sequence[str], known: int, *, mark: str = ""
    ) -> bytes:
        """A message with the points of a run (its id) from the step `known` on. That step is sent again,
        because some metrics of a step are later than others. Validations may be many steps later, so all
        of them are sent again. A browser leaves out those that it has."""
        all_again = (VALIDATION, *INTERVAL)
        last = {key: -1 if key in all_again else known - 1 for key in keys}
        found: dict[str, list[tuple[int, float]]] = {}
        for _ in range(MISSED_READS):
            points = await self._runs.new_points(run, last)
            for key, added in points.items():
                found.setdefault(key, []).extend(added)
                last[key] = added[-1][0]
            if not points:
                break
        thinned = {key: finite_points(thin(all_, MISSED_POINTS)) for key, all_ in found.items()}
        newest = max((known, *(all_[-1][0] for all_ in found.values())))
        return _event({"points": thinned}, f"{newest}{mark}")

    async def _read(self, feed: _Feed, keys: Sequence[str]) -> None:
        """Read what is new until the run has ended or the database is away. Then the streams end, and
        browsers connect again."""
        try:
            await self._read_to_the_end(feed, keys)
        except UNAVAILABLE_ERRORS as error:
            logger.warning("the points of run %s cannot be read now: %s", feed.run, error)
        finally:
            feed.has_begun.set()
            self._forget(feed)
            feed.send(None)

    def _forget(self, feed: _Feed) -> None:
        if self._feeds.get(feed.run) is feed:
            del self._feeds[feed.run]

    async def _read_to_the_end(self, feed: _Feed, keys: Sequence[str]) -> None:
        with acting_as(Actor("dashboard", "dashboard", frozenset({"admin"}))):
            feed.last = await self._runs.last_steps(feed.run, keys)
            feed.has_begun.set()
            while True:
                found = await self._runs.get_run(feed.run)
                if found is None:
                    break
                points = await self._runs.new_points(feed.run, feed.last)
                message = await self._message(feed, found[0], points)
                if message is not None:
                    feed.send(message)
                if found[0]["status"] in ENDED:
                    break
                await asyncio.sleep(self._every_s)

    async def _message(
        self, feed: _Feed, run: RunJson, points: Mapping[str, Sequence[tuple[int, float]]]
    ) -> bytes | None:
        """A message with what is new about a run; None if nothing is."""
        state, elapsed_s = _state(run), self._clock.elapsed_s()
        is_old = elapsed_s - feed.figures_at >= FIGURES_EVERY_S
        if not points and not is_old and state.items() <= feed.shown.items():
            return None
        feed.figures_at, now = elapsed_s, self._clock.now()
        left = await times_left(self._runs, [run], now)
        figures = await figures_of(self._runs, run, now=now)
        shown = {
            **state,
            "figures": [one.text for one in figures],
            "intervals": [one.interval and formats.interval(one.interval) for one in figures],
            "progress": progress_text(run, left.get(run["id"])),
            "part": progress(run),
        }
        if not points and shown == feed.shown:
            return None
        feed.shown = shown
        feed.last |= {key: added[-1][0] for key, added in points.items()}
        finite = {key: finite_points(added) for key, added in points.items()}
        newest = max(feed.last.values(), default=0)
        return _event({**shown, "points": finite}, str(max(newest, 0)))


def _state(run: RunJson) -> Mapping[str, object]:
    """Where a run stands."""
    return {
        "status": run["status"],
        "phase": run["phase"],
        "state": state_of(run),
        "step": run["current_step"] or 0,
        "total": run["total_steps"],
    }


def _event(values: Mapping[str, object], identity: str) -> bytes:
    data = json.dumps(values, separators=(",", ":"))
    return f"event: points\nid: {identity}\ndata: {data}\n\n".encode()


async def follow(request: Request) -> Response:
    """The new points of a run as server-sent events."""
    run, _ = await find_run(request)
    live, keys = _live_runs(request), DRAWN
    found = STEP_ID.fullmatch(request.headers.get("last-event-id", ""))
    known = int(found[1]) if found else None
    if run["status"] in ENDED:
        if known is None or (found and found[2]):
            return Response(status_code=204)  # tells a browser not to connect again
        rest = await live.read_missed(run["id"], keys, known, mark=f"-{AT_END}")
        return Response(rest, media_type=EVENTS)
    if live.num_viewers >= MOST_VIEWERS:
        raise TransientError("too many pages follow runs now; read this one again later")
    messages = live.messages(run["id"], keys, known=known)
    # The answer begins when no later point can be missed: then the browser reads the curves.
    await anext(messages)

    async def stream() -> AsyncIterator[bytes]:
        clock = services(request).clock
        checked = clock.elapsed_s()
        yield b": headrace\n\n"
        async for message in messages:
            if not await is_still_valid(request):
                return
            if (now := clock.elapsed_s()) - checked >= SESSION_CHECKED_S:
                checked = now
                if not await _has_session(request):
                    return
            yield message or b": still here\n\n"

    return StreamingResponse(stream(), media_type=EVENTS, headers={"X-Accel-Buffering": "no"})


async def _has_session(request: Request) -> bool:
    """Whether the session of a request still lasts. A request with an API key needs none."""
    if bearer_of(request.scope.get("state") or {}) is None:
        return True
    core = services(request)
    cookie = cookie_of(request.headers, name=cookie_name(core.settings.public_url))
    return await core.sessions.find_bearer(cookie) is not None


def _live_runs(request: Request) -> LiveRuns:
    state = request.app.state
    if not hasattr(state, "live_runs"):
        core = services(request)
        state.live_runs = LiveRuns(core.readmodel.runs, clock=core.clock)
    found: LiveRuns = state.live_runs
    return found


ROUTES = [PageRoute("/runs/{ref}/live", follow, scope="read")]
