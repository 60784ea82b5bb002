"""`headrace sessions`: where the dashboard is open, and signing out everywhere."""

import click

from producers.cli.client import Client
from producers.cli.command_tree import command, group
from producers.cli.display.output import print_json, print_table, say, time_ago

sessions = group("sessions", "Open sessions of the dashboard: list, end.")

OWNER = click.option("--owner", metavar="NAME", help="Of this user. Default: you.")
EVERYONE = click.option("--all", "everyone", is_flag=True, help="Of all users.")


@command(sessions, "list", example="headrace sessions list --all")
@OWNER
@EVERYONE
def list_(*, owner: str | None, everyone: bool, as_json: bool) -> None:
    """List the open sessions of a user, newest first."""
    with Client() as client:
        found = client.get("/sessions", _parameters(owner, everyone=everyone))
    if as_json:
        print_json(found)
        return
    if not found["sessions"]:
        say("no open sessions")
        return
    print_table(
        "Sessions",
        ("session", "user", "token", "signed in", "ends"),
        [
            (
                one["id"],
                one["owner"],
                one["token_name"] or one["token"],
                time_ago(one["created_at"]),
                f"{one['expires_at'][:16].replace('T', ' ')} UTC",
            )
            for one in found["sessions"]
        ],
    )


@command(sessions, "end", example="headrace sessions end --owner ada")
@OWNER
@EVERYONE
def end(*, owner: str | None, everyone: bool, as_json: bool) -> None:
    """Sign a user out everywhere: end all sessions and unused sign-in links."""
    with Client() as client:
        ended = client.delete("/sessions", **_parameters(owner, everyone=everyone))
    if as_json:
        print_json(ended)
        return
    count = ended["ended"]
    say(f"ended {count} session{'' if count == 1 else 's'}; tokens stay valid")


def _parameters(owner: str | None, *, everyone: bool) -> dict[str, str]:
    named = {"owner": owner} if owner else {}
    return {**named, "all": "true"} if everyone else named
