"""`headrace token`: the tokens of the API."""

from datetime import UTC, datetime

import click

from producers.cli.client import Client, path_segment
from producers.cli.command_options import parse_age_s
from producers.cli.command_tree import command, group
from producers.cli.display.output import Document, print_json, print_table, say, time_ago

token = group("token", "Tokens of the API: create, list, rotate, revoke.")


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
@click.option("--expires", metavar="AGE", help="12h, 90d or never. Default: 365d.")
@click.option("--owner", metavar="NAME", help="Whose token it is. Default: yours.")
def create(
    name: str,
    *,
    scopes: tuple[str, ...],
    workspace: str | None,
    expires: str | None,
    owner: str | None,
    as_json: bool,
) -> None:
    """Make a token, and print it. It is not shown again."""
    body = {
        "name": name,
        "scopes": list(scopes or ("read",)),
        "workspace": workspace,
        "owner": owner,
        "expires_s": _lifetime(expires),
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
        f"it expires: {_expiry(found)}; keep it now, because it is not shown again"
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


@command(token, "rotate", example="headrace token rotate ci --overlap 1d")
@click.argument("ref", metavar="NAME|ID")
@click.option(
    "--overlap",
    metavar="AGE",
    default="1h",
    help="How long the old secret stays valid: 0s, 1h (default), up to 30d.",
)
@click.option("--expires", metavar="AGE", help="12h, 90d or never. Default: as long as it had.")
def rotate(ref: str, *, overlap: str, expires: str | None, as_json: bool) -> None:
    """Give a token a new secret, and print it. It is not shown again."""
    body = {
        "overlap_s": parse_age_s(overlap, option="--overlap"),
        "expires_s": _lifetime(expires),
    }
    content = {key: value for key, value in body.items() if value is not None}
    with Client() as client:
        made = client.post(f"/tokens/{path_segment(ref)}/rotate", content)
    if as_json:
        print_json(made)
        return
    found = made["token"]
    say(str(made["secret"]))
    say(
        f"made a new secret for the token {found['prefix']} ({found['name']}); it expires: "
        f"{_expiry(found)}; the old secret is valid until {_moment(found['old_secret_until'])}; "
        "keep the new one now, because it is not shown again"
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
        _expiry(found),
        time_ago(found["last_used_at"]),
        _state(found),
    )


def _state(found: Document) -> str:
    if found["revoked_at"]:
        return f"revoked {time_ago(found['revoked_at'])}"
    expires_at = found["expires_at"]
    is_expired = expires_at and datetime.fromisoformat(expires_at) <= datetime.now(UTC)
    return "expired" if is_expired else "valid"


def _lifetime(expires: str | None) -> int | str | None:
    """The value of `--expires` as the API takes it."""
    if expires is None or expires == "never":
        return expires
    return parse_age_s(expires, option="--expires")


def _expiry(found: Document) -> str:
    return _moment(found["expires_at"]) if found["expires_at"] else "never"


def _moment(text: str) -> str:
    return f"{text[:16].replace('T', ' ')} UTC"
