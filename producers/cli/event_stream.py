"""Follows the events of a run as they happen, across lost connections and restarts of the server.

The server sends server-sent events. The id of each is a cursor, so a new connection continues exactly
where the last one broke.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence

import httpx

from producers.cli.client import Client, path_segment
from producers.cli.display.output import Document
from producers.cli.errors import Failure

ENDS = ("rl.run.finished", "rl.run.failed", "rl.run.stopped", "rl.run.rejected")
"""The events that end a run."""

UNREACHABLE_S = 30.0
"""How long the server may be unreachable, for example during a restart, before following fails."""
PAUSE_S = 0.2


def follow_events(
    client: Client, run: str, *, after: str | None = None, types: Sequence[str] = ()
) -> Iterator[Document]:
    """The events of the run (CloudEvents as JSON objects), until the one that ends it. Raises
    Failure."""
    path = f"/runs/{path_segment(run)}/events"
    if types:
        path += "?types=" + ",".join(types)
    cursor, since = after, time.monotonic()
    while True:
        try:
            for identity, event in _connection(client, path, cursor):
                cursor, since = identity or cursor, time.monotonic()
                yield event
                if event.get("type") in ENDS:
                    return
        except httpx.TransportError as error:
            if time.monotonic() - since > UNREACHABLE_S:
                raise client.unreachable() from error
        except Failure as failure:
            if failure.code not in ("UNAVAILABLE", "UNREACHABLE") or (
                time.monotonic() - since > UNREACHABLE_S
            ):
                raise
        time.sleep(PAUSE_S)


def _connection(
    client: Client, path: str, cursor: str | None
) -> Iterator[tuple[str | None, Document]]:
    headers = {"Accept": "text/event-stream"}
    if cursor:
        headers["Last-Event-ID"] = cursor
    with client.stream(path, headers=headers) as answer:
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
