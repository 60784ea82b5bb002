"""New points of curves, for the viewers of a run.

A run is read once for all its viewers, and only while it has any. Each viewer gets the same bytes. One
that reads too slowly loses its stream. Its browser connects again and reads the curves as a whole.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from infra.ports.actor import Actor, acting_as
from infra.readmodel.runs import Runs
from producers.dashboard.charts import finite_points
from producers.dashboard.pages.run import ENDED, TITLES
from producers.dashboard.routing import PageRoute
from producers.http.auth import is_still_valid
from producers.http.routes.runs import find_run, services
from schemas.errors import TransientError

EVERY_S = 0.5
COMMENT_EVERY_S = 15.0
MOST_WAITING = 32
"""How many messages may wait for a viewer."""

MOST_VIEWERS = 2000


@dataclass(eq=False)
class _Feed:
    """A run that somebody views. `last` is the newest step that was sent, by metric."""

    run: str
    viewers: set[asyncio.Queue[bytes | None]] = field(default_factory=set)
    last: dict[str, int] = field(default_factory=dict)
    shown: Mapping[str, object] = field(default_factory=dict)
    reading: asyncio.Task[None] | None = None

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

    def __init__(self, runs: Runs, *, every_s: float = EVERY_S) -> None:
        self._runs = runs
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

    async def messages(self, run: str, keys: Sequence[str]) -> AsyncGenerator[bytes | None, None]:
        """Yield server-sent events about a run (its id) and these metrics until it ends; None from time
        to time when there are none. Points that exist when this begins are not sent."""
        feed = self._feeds.setdefault(run, _Feed(run))
        viewer: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)
        feed.viewers.add(viewer)
        if feed.reading is None:
            feed.reading = asyncio.ensure_future(self._read(feed, keys))
        try:
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
                self._feeds.pop(feed.run, None)
                feed.reading.cancel()

    async def _read(self, feed: _Feed, keys: Sequence[str]) -> None:
        """Read what is new until the run has ended."""
        with acting_as(Actor("dashboard", "dashboard", frozenset({"admin"}))):
            feed.last = await self._runs.last_steps(feed.run, keys)
            while True:
                found = await self._runs.get(feed.run)
                if found is None:
                    break
                points = await self._runs.new_points(feed.run, feed.last)
                run = found[0]
                shown = {
                    "status": run["status"],
                    "phase": run["phase"],
                    "step": run["current_step"] or 0,
                    "total": run["total_steps"],
                }
                if points or shown != feed.shown:
                    feed.shown = shown
                    feed.last |= {key: added[-1][0] for key, added in points.items()}
                    finite = {key: finite_points(added) for key, added in points.items()}
                    feed.send(_event({**shown, "points": finite}))
                if run["status"] in ENDED:
                    break
                await asyncio.sleep(self._every_s)
        feed.send(None)


def _event(values: Mapping[str, object]) -> bytes:
    data = json.dumps(values, separators=(",", ":"))
    return f"event: points\ndata: {data}\n\n".encode()


async def follow(request: Request) -> Response:
    """The new points of a run as server-sent events."""
    run, _ = await find_run(request)
    if run["status"] in ENDED:
        return Response(status_code=204)  # tells a browser not to connect again
    live = _live_runs(request)
    if live.num_viewers >= MOST_VIEWERS:
        raise TransientError("too many pages follow runs now; read this one again later")

    async def stream() -> AsyncIterator[bytes]:
        yield b": headrace\n\n"
        async for message in live.messages(run["id"], tuple(TITLES)):
            if not await is_still_valid(request):
                return
            yield message or b": still here\n\n"

    return StreamingResponse(
        stream(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


def _live_runs(request: Request) -> LiveRuns:
    state = request.app.state
    if not hasattr(state, "live_runs"):
        state.live_runs = LiveRuns(services(request).readmodel.runs)
    found: LiveRuns = state.live_runs
    return found


ROUTES = [PageRoute("/runs/{ref}/live", follow, scope="read")]
