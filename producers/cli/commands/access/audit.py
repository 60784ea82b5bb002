"""`headrace audit`: who asked for what."""

from datetime import UTC, datetime, timedelta
from itertools import islice

import click

from producers.cli.client import Client
from producers.cli.command import command
from producers.cli.command_tree import parse_age_s
from producers.cli.display.output import Document, Output, one_line, table


@command(None, "audit", example="headrace audit --since 2d")
@click.option("--since", metavar="AGE", help="Only requests of the last 30m, 12h, 2d and so on.")
@click.option("--key", metavar="KEY", help="Only of this API key (id or name) or owner.")
@click.option("--token", "old_key", hidden=True, help="The old name of --key.")
@click.option("--limit", default=100, show_default=True, help="Show at most this many.")
def audit(
    client: Client,
    *,
    since: str | None,
    key: str | None,
    old_key: str | None,
    limit: int,
) -> Output:
    """Show who asked for what, newest first: API key, address, route and status.

    Reads and refused requests that are alike are counted together.
    """
    after = None
    if since is not None:
        after = datetime.now(UTC) - timedelta(seconds=parse_age_s(since, option="--since"))
    parameters = {"since": after.isoformat() if after else None, "api_key": key or old_key}
    found = list(islice(client.pages("/audit", "audit", parameters), limit))
    columns = ("time", "by", "address", "request", "status", "times")
    rows = [_row(entry) for entry in found]
    return Output({"audit": found}, table("Requests", columns, rows, empty="no requests"))


def _row(entry: Document) -> tuple[object, ...]:
    api_key = entry.get("api_key_name") or entry["api_key"]
    by = f"{entry['owner']}/{api_key}" if api_key else "nobody known"
    asked = one_line(f"{entry['method']} {entry['subject']}", limit=60)
    status = f"{entry['status']}" if entry["allowed"] else f"{entry['status']} refused"
    return entry["at"][:19], by, entry["address"], asked, status, entry["count"]
