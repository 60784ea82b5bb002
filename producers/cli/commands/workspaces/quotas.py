"""`headrace workspace quotas`: what a workspace may use, and what it has used."""

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.display.output import Document, Output, table
from producers.cli.display.units import minute
from producers.cli.errors import Failure

FREES = {
    "runs_at_once": "when a run ends",
    "samples_in_flight": "when a sample ends",
}
"""When a quota of what is there at once frees."""


@command(None, "quotas", example="headrace workspace quotas sums --set runs_at_once=4")
@click.argument("name", metavar="WORKSPACE")
@click.option(
    "--set",
    "limits",
    multiple=True,
    metavar="QUOTA=LIMIT",
    help="Let it use this much: a number, unlimited or default. For administrators.",
)
def quotas(client: Client, name: str, *, limits: tuple[str, ...]) -> Output:
    """Show the limits of a workspace and their use.

    Those of your API key are shown too.
    """
    path = f"/workspaces/{path_segment(name)}/quotas"
    wanted = dict(_pair(text) for text in limits)
    found = client.post(path, {"limits": wanted}) if wanted else client.get(path)
    return Output(
        found,
        table(
            f"Quotas of {found['workspace']}",
            ("of", "quota", "limit", "used", "frees"),
            [_row(one) for one in found["quotas"]],
        ),
    )


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise Failure("INVALID_OPTION", f"--set {text!r} must be QUOTA=LIMIT, like runs_at_once=4")
    return name, value


def _row(one: Document) -> tuple[object, ...]:
    frees = one["frees_at"]
    return (
        one["holder"],
        one["name"],
        "unlimited" if one["most"] is None else one["most"],
        one["used"],
        minute(frees) if frees else FREES[one["name"]],
    )
