"""Follows the events of a run as they happen, across lost connections and restarts of the server.

The server sends server-sent events. The id of each is a cursor, so a new connection continues exactly
where the last one broke.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import httpx

from producers.cli.client import Client, path_segment
from producers.cli.display.output import Document
from producers.cli.errors import Failure

ENDS = ("rl.run.finished", "rl.run.failed", "rl.run.stopped", "rl.run.rejected")
"""The events that end a run."""

UNREACHABLE_S = 180.0
"""How long the server may be unreachable, for example during a restart, before following fails."""
TOLD_S = 3.0
"""How long it may be unreachable before `on_lost` is called."""
PAUSE_S = 0.2


def follow_events(
    client: Client,
    run: str,
    *,
    after: str | None = None,
    types: Sequence[str] = (),
    on_lost: Callable[[], None] = lambda: None,
) -> Iterator[Document]:
    """The events of the run (CloudEvents as JSON objects), until the one that ends it. `on_lost` is
    called once each time that the server stays unreachable. Raises Failure."""
    path = f"/runs/{path_segment(run)}/events"
    if types:
        path += "?types=" + ",".join(types)
    cursor, outage = after, Outage(on_lost)
    while True:
        try:
            for identity, event in _connection(client, path, cursor, on_open=outage.end):
                cursor = identity or cursor
                yield event
                if event.get("type") in ENDS:
                    return
        except httpx.TransportError as error:
            if outage.is_too_long():
                raise client.unreachable() from error
        except Failure as failure:
            if failure.code not in AWAY or outage.is_too_long():
                raise
        time.sleep(PAUSE_S)


AWAY = ("UNAVAILABLE", "UNREACHABLE")
"""The codes of failures that end when the server is back."""


class Outage:
    """How long a server has been unreachable. `on_lost` is called once in each outage that lasts."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._since: float | None = None
        self._is_told = False

    def end(self) -> None:
        """Note that the server answers."""
        self._since, self._is_told = None, False

    def is_too_long(self) -> bool:
        """Note that the server does not answer. Returns whether that has been so for too long."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since > TOLD_S and not self._is_told:
            self._is_told = True
            self._on_lost()
        return now - self._since > UNREACHABLE_S


def _connection(
    client: Client, path: str, cursor: str | None, *, on_open: Callable[[], None]
) -> Iterator[tuple[str | None, Document]]:
    headers = {"Accept": "text/event-stream"}
    if cursor:
        headers["Last-Event-ID"] = cursor
    with client.stream(path, headers=headers) as answer:
        on_open()
        yield from parse_events(answer.iter_lines())


def parse_events(lines: Iterable[str]) -> Iterator[tuple[str | None, Document]]:
    """Parse the lines of server-sent events into pairs of id and JSON data."""
    identity: str | None = None
    data: list[str] = []
    for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if line == "" and data:
            yield identity, json.loads("\n".join(data))
            data = []
        elif name == "id":
            identity = value
        elif name == "data":
            data.append(value)
