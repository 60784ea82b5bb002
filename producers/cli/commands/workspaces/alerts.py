"""`headrace workspace alerts`: where alerts about the runs of a workspace go."""

import click

from infra.settings.alerts import ALERT_KINDS
from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.display.output import Document, Output, table
from producers.cli.errors import Failure


@command(
    None, "alerts", example="headrace workspace alerts sums --mail ada@example.org --on failed"
)
@click.argument("name", metavar="WORKSPACE")
@click.option("--webhook", metavar="URL", help="Add a webhook, and print its secret once.")
@click.option("--mail", metavar="ADDRESS", help="Add a mail address.")
@click.option(
    "--on",
    "kinds",
    multiple=True,
    metavar="KIND",
    type=click.Choice(ALERT_KINDS),
    help="With --webhook or --mail: ended, failed, collapsed or stalled; may be given several "
    "times. Default: all.",
)
@click.option("--rotate", metavar="ID", help="Give a webhook another secret, and print it once.")
@click.option("--remove", metavar="ID", help="Remove a target.")
def alerts(
    client: Client,
    name: str,
    *,
    webhook: str | None,
    mail: str | None,
    kinds: tuple[str, ...],
    rotate: str | None,
    remove: str | None,
) -> Output:
    """Show or change where alerts of a workspace go."""
    if sum(one is not None for one in (webhook, mail, rotate, remove)) > 1:
        raise Failure("INVALID_OPTION", "give one of --webhook, --mail, --rotate and --remove")
    path = f"/workspaces/{path_segment(name)}/alerts"
    if webhook is not None or mail is not None:
        medium, address = ("webhook", webhook) if webhook is not None else ("mail", mail)
        body = {"medium": medium, "address": address} | ({"kinds": kinds} if kinds else {})
        found = client.post(path, body)
    elif rotate is not None:
        found = client.post(f"{path}/{path_segment(rotate)}/rotate", {})
    elif remove is not None:
        found = client.delete(f"{path}/{path_segment(remove)}")
    else:
        found = client.get(path)
    if "targets" in found:
        columns = ("id", "medium", "to", "on", "last error")
        rows = [_row(one) for one in found["targets"]]
        return Output(found, table(f"Alerts of {found['workspace']}", columns, rows))
    if "removed" in found:
        return Output(found, f"removed the target {found['removed']}")
    target = found["target"] if isinstance(found["target"], str) else found["target"]["id"]
    if found["secret"] is None:
        return Output(found, f"alerts go to {target}")
    return Output(
        found,
        str(found["secret"]),
        f"this secret signs the alerts of {target}; keep it now, because it is not shown again; how "
        "to verify them: docs/runbook.md",
    )


def _row(one: Document) -> tuple[object, ...]:
    return (one["id"], one["medium"], one["shown"], ", ".join(one["kinds"]), one["error"])
