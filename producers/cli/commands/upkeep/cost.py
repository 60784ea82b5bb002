"""`headrace cost`: what runs, workspaces, users and steps cost."""

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import click

from producers.cli.client import Client
from producers.cli.command import command
from producers.cli.command_tree import parse_age_s
from producers.cli.display.costs import COLUMNS, cost_row, dollars
from producers.cli.display.output import Document, Output, one_line, say, table

KEYS = ("run", "workspace", "organisation", "user", "step", "sample")
CSV_COLUMNS = (
    "key",
    "name",
    "cost",
    "cost_wasted",
    "calls_usd",
    "tokens_sampled",
    "tokens_trained",
    "tokens_discarded",
    "stored_bytes",
)
MOST_LINES = 100_000
"""The most lines that the server gives at once."""


@command(None, "cost", example="headrace cost --by workspace --since 7d")
@click.option("--by", type=click.Choice(KEYS), default="run", help="What a line is. Default: run.")
@click.option("--run", help="Only this run or evaluation (name or id).")
@click.option("--since", metavar="AGE", help="Only what was done in the last 12h, 7d and so on.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
def cost(client: Client, *, by: str, run: str | None, since: str | None, as_csv: bool) -> Output:
    """Show what runs and evaluations cost: device-hours, tokens and money.

    Effects that were repeated, and work that was lost with its worker, count as wasted.
    Money needs the setting HEADRACE_PRICES.
    """
    after = None
    if since is not None:
        after = datetime.now(UTC) - timedelta(seconds=parse_age_s(since, option="--since"))
    parameters = {"by": by, "run": run, "since": after.isoformat() if after else None}
    answer = client.get("/cost", {**parameters, "limit": MOST_LINES})
    if answer["num_lines"] > len(answer["lines"]):
        say(
            f"note: these are {len(answer['lines'])} of {answer['num_lines']} lines, and the total is "
            "that of all; narrow them with --run or --since"
        )
    if as_csv:
        return Output(answer, _csv(answer["lines"], by=by))
    rows = [cost_row(line, by=by) for line in answer["lines"]]
    total = answer["total"]
    rows += [cost_row(total | {"name": "total"}, by=by)] if len(rows) > 1 else []
    shown = table(f"Cost by {by}", (by, *COLUMNS), rows, empty="nothing has cost anything yet")
    return Output(answer, shown, _waste_text(total), _note(answer))


def _waste_text(total: Document) -> str | None:
    """Which effects were repeated or lost."""
    found: Mapping[str, float] = total["wasted"]
    if not found:
        return None
    parts = (f"{effect} {seconds:.1f} s" for effect, seconds in sorted(found.items()))
    money = f" ({dollars(total['cost_wasted'])})" if total["cost_wasted"] is not None else ""
    return f"wasted by attempts that were repeated or lost: {', '.join(parts)}{money}"


def _note(answer: Document) -> str | None:
    """Which prices are missing."""
    missing = answer["total"]["unpriced_devices"]
    if not missing:
        return None
    keys = ("cpu_hour" if kind == "cpu" else f"gpu_hour.{kind[4:]}" for kind in missing)
    return f"no price for {', '.join(missing)}: set {', '.join(keys)} in HEADRACE_PRICES"


def _csv(lines: Sequence[Document], *, by: str) -> str:
    kinds = sorted({kind for line in lines for kind in line["device_hours"]})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*CSV_COLUMNS, *(f"{kind}_hours" for kind in kinds), "wasted_s"))
    for line in lines:
        # A line without any was not measured, which is not the same as 0.
        unknown = None if not line["device_hours"] else 0.0
        hours = (line["device_hours"].get(kind, unknown) for kind in kinds)
        wasted = round(sum(line["wasted"].values()), 3) if line["device_hours"] else None
        named = line | {"name": line["workspace_name"]} if by == "workspace" else line
        cells = (*(named[key] for key in CSV_COLUMNS), *hours, wasted)
        writer.writerow(_plain(cell) for cell in cells)
    return text.getvalue().rstrip("\n")


def _plain(cell: object) -> object:
    """A cell that a spreadsheet does not take for a formula."""
    text = one_line(cell, limit=200) if isinstance(cell, str) else cell
    return f"'{text}" if isinstance(text, str) and text.startswith(("=", "+", "-", "@")) else text
