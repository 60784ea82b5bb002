"""`headrace member`: the people of an organisation and their roles. `headrace person`: all people of the
installation."""

from collections.abc import Mapping
from typing import Any

import click

from infra.ports.actor import ROLES
from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import group
from producers.cli.display.output import Output, note, table, time_ago
from producers.cli.display.units import minute

member = group("member", "Members of an organisation: list, invite, role, remove and more.")
person = group("person", "People of the installation, for its operator: list, remove.")

ORGANISATION = click.option(
    "--organisation",
    "--org",
    "organisation",
    metavar="NAME",
    help="The organisation. Default: that of your API key.",
)
ROLE = click.Choice(ROLES)


def _path(client: Client, organisation: str | None, what: str = "members") -> str:
    """The path of the members of an organisation, or of that of the API key."""
    ref = organisation or client.get("/whoami")["organisation"] or "main"
    return f"/organisations/{path_segment(str(ref))}/{what}"


def _role(member: Mapping[str, Any]) -> str:
    return f"{member['role']} (from groups)" if member.get("from_groups") else str(member["role"])


@command(member, "list", example="headrace member list")
@ORGANISATION
def list_members(client: Client, *, organisation: str | None) -> Output:
    """List the members of an organisation."""
    found = list(client.pages(_path(client, organisation), "members"))
    rows = [
        (one["id"], one["name"], one["email"], _role(one), time_ago(one["joined_at"]))
        for one in found
    ]
    columns = ("person", "name", "e-mail", "role", "since")
    empty = "no members; `headrace member invite --role owner` invites the first one"
    return Output(
        {"members": found, "total_count": len(found)}, table("Members", columns, rows, empty=empty)
    )


@command(member, "invite", example="headrace member invite --role member --email ada@example.org")
@click.option("--role", type=ROLE, default="member", show_default=True, help="The person's role.")
@click.option("--email", metavar="ADDRESS", help="Only the person with this address may use it.")
@ORGANISATION
def invite(client: Client, *, role: str, email: str | None, organisation: str | None) -> Output:
    """Make a link that makes one person a member, and print it. It is not shown again."""
    body = {"role": role, **({"email": email} if email else {})}
    made = client.post(_path(client, organisation, "invitations"), body)
    until = minute(made["invitation"]["expires_at"])
    return Output(
        made,
        str(made["url"]),
        note(
            f"this link into {made['organisation']} works once, until {until}; send it to one person"
        ),
    )


@command(member, "invitations", example="headrace member invitations")
@ORGANISATION
def list_invitations(client: Client, *, organisation: str | None) -> Output:
    """List the invitations that are open."""
    found = client.get(_path(client, organisation, "invitations"))
    rows = [
        (
            one["id"],
            one["role"],
            one["email"] or "anyone",
            one["created_by"],
            minute(one["expires_at"]),
        )
        for one in found["invitations"]
    ]
    columns = ("invitation", "role", "e-mail", "made by", "expires")
    return Output(found, table("Invitations", columns, rows, empty="no open invitations"))


@command(member, "uninvite", example="headrace member uninvite k3f9x2m1ab")
@click.argument("invitation", metavar="INVITATION")
@ORGANISATION
def uninvite(client: Client, invitation: str, *, organisation: str | None) -> Output:
    """End an open invitation."""
    path = _path(client, organisation, "invitations")
    revoked = client.delete(f"{path}/{path_segment(invitation)}")
    return Output(revoked, f"ended the invitation {invitation}")


@command(member, "role", example="headrace member role ada@example.org owner")
@click.argument("ref", metavar="PERSON")
@click.argument("role", type=ROLE)
@ORGANISATION
def change_role(client: Client, ref: str, role: str, *, organisation: str | None) -> Output:
    """Give a member (id, e-mail address or name) another role."""
    path = f"{_path(client, organisation)}/{path_segment(ref)}"
    changed = client.put_json(path, {"role": role})
    found = changed["member"]
    return Output(changed, f"{found['name']} ({found['email']}) is {found['role']} now")


@command(member, "remove", example="headrace member remove ada@example.org")
@click.argument("ref", metavar="PERSON")
@ORGANISATION
def remove(client: Client, ref: str, *, organisation: str | None) -> Output:
    """Remove a member (id, e-mail address or name), or leave.

    The API keys of the person in the organisation are refused from now on. Runs go on.
    """
    removed = client.delete(f"{_path(client, organisation)}/{path_segment(ref)}")
    return Output(removed, f"removed {removed['name']} ({removed['removed']})")


@command(person, "list", example="headrace person list")
@click.option("--all", "everyone", is_flag=True, help="Include people who were removed.")
def list_people(client: Client, *, everyone: bool) -> Output:
    """List the people of the installation."""
    parameters = {"removed": "true" if everyone else "false"}
    found = list(client.pages("/people", "people", parameters))
    rows = [
        (
            one["id"],
            one["name"],
            one["email"],
            time_ago(one["created_at"]),
            time_ago(one["removed_at"]) if one["removed_at"] else "",
        )
        for one in found
    ]
    columns = ("person", "name", "e-mail", "since", "removed")
    return Output(
        {"people": found, "total_count": len(found)},
        table("People", columns, rows, empty="no people; `headrace member invite` invites one"),
    )


@command(person, "remove", example="headrace person remove ada@example.org")
@click.argument("ref", metavar="PERSON")
def remove_person(client: Client, ref: str) -> Output:
    """Remove a person (id or e-mail address) from all organisations."""
    removed = client.delete(f"/people/{path_segment(ref)}")
    return Output(removed, f"removed {removed['name']} ({removed['removed']})")
