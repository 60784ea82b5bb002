"""`headrace audit`: who asked for what."""

from datetime import UTC, datetime, timedelta
from itertools import islice

import click

from producers.cli.client import Client
from producers.cli.command_options import parse_age_s
from producers.cli.command_tree import command
from producers.cli.display.output import Document, one_line, print_json, print_table, say


@command(None, "audit", example="headrace audit --since 2d")
@click.option("--since", metavar="AGE", help="Only requests of the last 30m, 12h, 2d and so on.")
@click.option("--token", metavar="TOKEN", help="Only of this token (id or name) or owner.")
@click.option("--limit", default=100, show_default=True, help="Show at most this many.")
def audit(*, since: str | None, token: str | None, limit: int, as_json: bool) -> None:
    """Show who asked for what, newest first: token, address, route and status.

    Reads and refused requests that are alike are counted together.
    """
    after = None
    if since is not None:
        after = datetime.now(UTC) - timedelta(seconds=parse_age_s(since, option="--since"))
    parameters = {"since": after.isoformat() if after else None, "token": token}
    with Client() as client:
        found = list(islice(client.pages("/audit", "audit", parameters), limit))
    if as_json:
        print_json({"audit": found})
        return
    if not found:
        say("no requests")
        return
    print_table(
        "Requests",
        ("time", "by", "address", "request", "status", "times"),
        [_row(entry) for entry in found],
    )


def _row(entry: Document) -> tuple[object, ...]:
    token = entry.get("token_name") or entry["token"]
    by = f"{entry['owner']}/{token}" if token else "nobody known"
    asked = one_line(f"{entry['method']} {entry['subject']}", limit=60)
    status = f"{entry['status']}" if entry["allowed"] else f"{entry['status']} refused"
    return entry["at"][:19], by, entry["address"], asked, status, entry["count"]
