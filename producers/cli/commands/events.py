"""`headrace events RUN`: the event log of a run."""

import json
import sys
from collections.abc import Iterator

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import RUN
from producers.cli.display.output import Document, one_line, say
from producers.cli.errors import Interrupted
from producers.cli.event_stream import follow_events

PAGE = 500


@command(None, "events", example="headrace events my-run --follow --json")
@RUN
@click.option(
    "--follow", "go_on", is_flag=True, help="Keep printing new events until the run ends."
)
@click.option("--after", metavar="CURSOR", help="Start after the event with this cursor.")
def events(client: Client, run: str, *, go_on: bool, after: str | None, as_json: bool) -> None:
    """Show the event log of a run, in order. --json prints one CloudEvent per line."""
    found = follow_events(client, run, after=after) if go_on else _all(client, run, after)
    try:
        for event in found:
            _show(event, as_json=as_json)
    except KeyboardInterrupt as error:
        raise Interrupted(f"stopped following {run}", f"headrace events {run} --follow") from error


def _all(client: Client, run: str, after: str | None) -> Iterator[Document]:
    """All events so far, fetched page by page."""
    cursor = after
    while True:
        page = client.get(f"/runs/{path_segment(run)}/events", {"after": cursor, "limit": PAGE})
        yield from page["events"]
        if len(page["events"]) < PAGE or page.get("next") in (None, cursor):
            return
        cursor = page["next"]


def _show(event: Document, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(event, ensure_ascii=False) + "\n")
        sys.stdout.flush()
        return
    data = event.get("data") or {}
    shown = {k: v for k, v in data.items() if isinstance(v, str | int | float | bool)}
    moment = str(event.get("time"))[11:23]
    if event.get("actor"):
        shown = {**shown, "by": event["actor"]}
    text = " ".join(f"{key}={one_line(str(value), limit=60)}" for key, value in shown.items())
    say(f"{moment}  {event.get('type')!s:<28}  {one_line(text, limit=160)}")
