"""`headrace audit`: who asked for what."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import click

from infra.identity.audit_chain import ChainReport
from infra.identity.audit_chain import verify as verify_chain
from producers.cli.client import Client
from producers.cli.command import command
from producers.cli.command_tree import HELP_OPTIONS, parse_age_s
from producers.cli.display.output import Document, Output, one_line, table
from producers.cli.errors import Failure


@command(None, "show", example="headrace audit --since 2d")
@click.option("--since", metavar="AGE", help="Only requests of the last 30m, 12h, 2d and so on.")
@click.option("--key", metavar="KEY", help="Only of this API key (id or name) or owner.")
@click.option("--token", "old_key", hidden=True, help="The old name of --key.")
@click.option("--limit", default=100, show_default=True, help="Show at most this many.")
def show(
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


@click.pass_context
def _show_unless_more(context: click.Context, /, **options: object) -> object:
    """Show the list, unless a command of the group follows."""
    return None if context.invoked_subcommand else context.invoke(show, **options)


audit = click.Group(
    "audit",
    callback=_show_unless_more,
    params=show.params,
    invoke_without_command=True,
    help=show.help,
    epilog=show.epilog,
    context_settings=HELP_OPTIONS,
)


@command(audit, "export", example="headrace audit export --output audit.jsonl")
@click.option("--format", "form", type=click.Choice(["jsonl"]), default="jsonl", help="JSON Lines.")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="A file. Default: stdout."
)
def export(client: Client, *, form: str, output: Path | None) -> Output | None:
    """Write all entries with their hashes, oldest first.

    Each line is the JSON of one entry, and the last one holds the heads of the chains.
    `headrace audit verify FILE` verifies the file without a server.
    """
    del form
    if output is not None:
        client.download("/audit/export", output)
        return Output({"file": str(output)}, f"wrote {output}")
    with client.stream("/audit/export") as answer:
        for chunk in answer.iter_bytes():
            sys.stdout.buffer.write(chunk)
    sys.stdout.flush()
    return None


@command(audit, "verify", example="headrace audit verify")
@click.argument(
    "file", required=False, type=click.Path(path_type=Path, dir_okay=False, exists=True)
)
def verify(client: Client, *, file: Path | None) -> Output:
    """Check that no entry was changed or deleted.

    The check begins at the oldest entry that is kept.
    Without FILE the server checks its list. The last hash of each chain is its head: keep it in
    another place, and a later export must still hold it.
    """
    if file is None:
        chains = client.get("/audit/verification")["chains"]
    else:
        chains = {name: asdict(one) for name, one in _verify_file(file).items()}
    broken = [
        f"{name}: entry {one['broken_at']}: {one['reason']}"
        for name, one in chains.items()
        if one["broken_at"] is not None
    ]
    columns = ("chain", "entries", "first", "last", "head")
    rows = [
        (name, one["entries"], one["first_id"], one["last_id"], one["head"] or "-")
        for name, one in chains.items()
    ]
    failure = None
    if broken:
        failure = Failure("AUDIT_CHAIN", f"the audit list is not whole: {'; '.join(broken)}")
    return Output({"chains": chains}, table("Chains", columns, rows), failure=failure)


def _verify_file(file: Path) -> Mapping[str, ChainReport]:
    """Verify the entries of an export. Raises Failure for a file that is not one."""
    try:
        with file.open() as lines:
            return verify_chain(json.loads(line) for line in lines)
    except (ValueError, KeyError, TypeError) as error:
        raise Failure(
            "VALIDATION", f"{file} is not a whole export of the audit list: {error}"
        ) from error


def _row(entry: Document) -> tuple[object, ...]:
    api_key = entry.get("api_key_name") or entry["api_key"]
    by = f"{entry['owner']}/{api_key}" if api_key else "nobody known"
    asked = one_line(f"{entry['method']} {entry['subject']}", limit=60)
    status = f"{entry['status']}" if entry["allowed"] else f"{entry['status']} refused"
    return entry["at"][:19], by, entry["address"], asked, status, entry["count"]
