"""`headrace token`: the tokens of the API."""

import click

from producers.cli.client import Client, path_segment
from producers.cli.command_options import parse_age_s
from producers.cli.command_tree import command, group
from producers.cli.display.output import Document, print_json, print_table, say, time_ago

token = group("token", "Tokens of the API: create, list, revoke.")


@command(token, "create", example="headrace token create ci --scope submit --expires 90d")
@click.argument("name", metavar="NAME")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    metavar="SCOPE",
    help="read, submit, control, admin, metrics or inference; may be given several times. "
    "Default: read.",
)
@click.option("--workspace", metavar="NAME", help="The only workspace that the token is for.")
@click.option("--expires", metavar="AGE", default="never", help="12h, 90d or never (default).")
@click.option("--owner", metavar="NAME", help="Whose token it is. Default: yours.")
def create(
    name: str,
    *,
    scopes: tuple[str, ...],
    workspace: str | None,
    expires: str,
    owner: str | None,
    as_json: bool,
) -> None:
    """Make a token, and print it. It is not shown again."""
    expires_s = None if expires == "never" else parse_age_s(expires, option="--expires")
    body = {
        "name": name,
        "scopes": list(scopes or ("read",)),
        "workspace": workspace,
        "owner": owner,
        "expires_s": expires_s,
    }
    with Client() as client:
        made = client.post("/tokens", {key: value for key, value in body.items() if value})
    if as_json:
        print_json(made)
        return
    found = made["token"]
    say(str(made["secret"]))
    say(
        f"made the token {found['prefix']} ({name}) of {found['owner']}: {', '.join(found['scopes'])}; "
        "keep it now, because it is not shown again"
    )


@command(token, "list", example="headrace token list")
@click.option("--all", "everything", is_flag=True, help="Include tokens that were revoked.")
def list_(*, everything: bool, as_json: bool) -> None:
    """List the tokens, newest first."""
    parameters = {"revoked": "true" if everything else "false"}
    with Client() as client:
        found = list(client.pages("/tokens", "tokens", parameters))
    if as_json:
        print_json({"tokens": found, "total_count": len(found)})
        return
    if not found:
        say("no tokens; `headrace token create NAME` makes one")
        return
    print_table(
        "Tokens",
        ("token", "name", "owner", "scopes", "workspace", "expires", "last used", "state"),
        [_row(each) for each in found],
    )


@command(token, "revoke", example="headrace token revoke ci")
@click.argument("ref", metavar="NAME|ID")
def revoke(ref: str, *, as_json: bool) -> None:
    """Refuse a token from now on."""
    with Client() as client:
        revoked = client.delete(f"/tokens/{path_segment(ref)}")
    if as_json:
        print_json(revoked)
        return
    say(f"revoked the token {revoked['name']} ({revoked['revoked']})")


def _row(found: Document) -> tuple[object, ...]:
    return (
        found["prefix"],
        found["name"],
        found["owner"],
        ", ".join(found["scopes"]),
        found["workspace"],
        (found["expires_at"] or "never")[:16],
        time_ago(found["last_used_at"]),
        f"revoked {time_ago(found['revoked_at'])}" if found["revoked_at"] else "valid",
    )
