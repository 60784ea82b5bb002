"""`headrace key`: API keys."""

from datetime import UTC, datetime

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import group, parse_age_s
from producers.cli.display.output import Document, Output, note, table, time_ago
from producers.cli.display.units import minute

api_key = group("key", "API keys: create, list, rotate, revoke.")


@command(api_key, "create", example="headrace key create ci --scope submit --expires 90d")
@click.argument("name", metavar="NAME")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    metavar="SCOPE",
    help="read, submit, control, admin, metrics or inference; may be given several times. "
    "Default: read.",
)
@click.option("--workspace", metavar="NAME", help="The only workspace that the API key is for.")
@click.option("--organisation", metavar="NAME", help="The only organisation that it is for.")
@click.option("--expires", metavar="AGE", help="12h, 90d or never. Default: 365d.")
@click.option("--owner", metavar="NAME", help="Whose API key it is. Default: yours.")
def create(
    client: Client,
    name: str,
    *,
    scopes: tuple[str, ...],
    workspace: str | None,
    organisation: str | None,
    expires: str | None,
    owner: str | None,
) -> Output:
    """Make an API key, and print it. It is not shown again."""
    body = {
        "name": name,
        "scopes": list(scopes or ("read",)),
        "workspace": workspace,
        "organisation": organisation,
        "owner": owner,
        "expires_s": _lifetime(expires),
    }
    made = client.post("/api-keys", {key: value for key, value in body.items() if value})
    found = made["api_key"]
    return Output(
        made,
        str(made["secret"]),
        note(
            f"made the API key {found['prefix']} ({name}) of {found['owner']}: "
            f"{', '.join(found['scopes'])}; "
            f"it expires: {_expiry(found)}; keep it now, because it is not shown again"
        ),
    )


@command(api_key, "list", example="headrace key list")
@click.option("--all", "everything", is_flag=True, help="Include API keys that were revoked.")
def list_(client: Client, *, everything: bool) -> Output:
    """List the API keys, newest first."""
    parameters = {"revoked": "true" if everything else "false"}
    found = list(client.pages("/api-keys", "api_keys", parameters))
    columns = ("key", "name", "owner", "scopes", "bound to", "expires", "last used", "state")
    empty = "no API keys; `headrace key create NAME` makes one"
    return Output(
        {"api_keys": found, "total_count": len(found)},
        table("API keys", columns, [_row(each) for each in found], empty=empty),
    )


@command(api_key, "rotate", example="headrace key rotate ci --overlap 1d")
@click.argument("ref", metavar="NAME|ID")
@click.option(
    "--overlap",
    metavar="AGE",
    default="1h",
    help="How long the old secret stays valid: 0s, 1h (default), up to 30d.",
)
@click.option("--expires", metavar="AGE", help="12h, 90d or never. Default: as long as it had.")
def rotate(client: Client, ref: str, *, overlap: str, expires: str | None) -> Output:
    """Give an API key a new secret, and print it. It is not shown again."""
    body = {
        "overlap_s": parse_age_s(overlap, option="--overlap"),
        "expires_s": _lifetime(expires),
    }
    content = {key: value for key, value in body.items() if value is not None}
    made = client.post(f"/api-keys/{path_segment(ref)}/rotate", content)
    found = made["api_key"]
    return Output(
        made,
        str(made["secret"]),
        note(
            f"made a new secret for the API key {found['prefix']} ({found['name']}); it expires: "
            f"{_expiry(found)}; the old secret is valid until {minute(found['old_secret_until'])}; "
            "keep the new one now, because it is not shown again"
        ),
    )


@command(api_key, "revoke", example="headrace key revoke ci")
@click.argument("ref", metavar="NAME|ID")
def revoke(client: Client, ref: str) -> Output:
    """Refuse an API key from now on."""
    revoked = client.delete(f"/api-keys/{path_segment(ref)}")
    return Output(revoked, f"revoked the API key {revoked['name']} ({revoked['revoked']})")


def _row(found: Document) -> tuple[object, ...]:
    return (
        found["prefix"],
        found["name"],
        found["owner"],
        ", ".join(found["scopes"]),
        found.get("workspace_name") or found.get("organisation_name") or "all",
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
    return minute(found["expires_at"]) if found["expires_at"] else "never"
