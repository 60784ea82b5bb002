"""`headrace sessions`: where the dashboard is open, and signing out everywhere."""

import click

from producers.cli.client import Client
from producers.cli.command import command
from producers.cli.command_tree import group
from producers.cli.display.output import Output, table, time_ago
from producers.cli.display.units import minute

sessions = group("sessions", "Open sessions of the dashboard: list, end.")

OWNER = click.option("--owner", metavar="NAME", help="Of this user. Default: you.")
EVERYONE = click.option("--all", "everyone", is_flag=True, help="Of all users.")


@command(sessions, "list", example="headrace sessions list --all")
@OWNER
@EVERYONE
def list_(client: Client, *, owner: str | None, everyone: bool) -> Output:
    """List the open sessions of a user, newest first."""
    found = client.get("/sessions", _parameters(owner, everyone=everyone))
    rows = [
        (
            one["id"],
            one["owner"],
            one["api_key_name"] or one["api_key"],
            time_ago(one["created_at"]),
            minute(one["expires_at"]),
        )
        for one in found["sessions"]
    ]
    columns = ("session", "user", "API key", "signed in", "ends")
    return Output(found, table("Sessions", columns, rows, empty="no open sessions"))


@command(sessions, "end", example="headrace sessions end --owner ada")
@OWNER
@EVERYONE
def end(client: Client, *, owner: str | None, everyone: bool) -> Output:
    """Sign a user out everywhere: end all sessions and unused sign-in links."""
    ended = client.delete("/sessions", **_parameters(owner, everyone=everyone))
    count = ended["ended"]
    return Output(ended, f"ended {count} session{'' if count == 1 else 's'}; API keys stay valid")


def _parameters(owner: str | None, *, everyone: bool) -> dict[str, str]:
    named = {"owner": owner} if owner else {}
    return {**named, "all": "true"} if everyone else named
