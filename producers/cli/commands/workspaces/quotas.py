"""`headrace workspace quotas`: what a workspace may use, and what it has used."""

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.display.output import Output
from producers.cli.display.quotas import limits_of, quotas_table


@command(None, "quotas", example="headrace workspace quotas sums --set runs_at_once=4")
@click.argument("name", metavar="WORKSPACE")
@click.option(
    "--set",
    "limits",
    multiple=True,
    metavar="QUOTA=LIMIT",
    help="Let it use this much: a number, unlimited or default. For owners and administrators.",
)
def quotas(client: Client, name: str, *, limits: tuple[str, ...]) -> Output:
    """Show the limits of a workspace and their use.

    Those of your API key are shown too. An owner of the organisation sets limits within what the
    operator allows.
    """
    path, wanted = f"/workspaces/{path_segment(name)}/quotas", limits_of(limits)
    found = client.post(path, {"limits": wanted}) if wanted else client.get(path)
    return Output(found, quotas_table(found["workspace"], found["quotas"]))
