"""`headrace secret`: values that user code gets as environment variables, and that nobody can read back.

A value never arrives in an argument, because arguments are visible to every process of the machine.
"""

import os
import sys
from pathlib import Path

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import group
from producers.cli.display.output import Document, Output, table, time_ago
from producers.cli.errors import Failure
from schemas.secrets.rules import check_secret_name

MOST_VALUE_BYTES = 32 << 10

secret = group("secret", "Secrets for user code: set, list and delete. Values are never shown.")

SCOPE = click.option(
    "--scope",
    type=click.Choice(["workspace", "personal"]),
    default="workspace",
    show_default=True,
    help="Who may use it: every run of a workspace, or only your own runs.",
)
WORKSPACE = click.option(
    "--workspace", metavar="NAME", help="The workspace. Default: the only one on the server."
)


@command(secret, "set", example="headrace secret set SEARCH_KEY < key.txt")
@click.argument("name", metavar="NAME")
@SCOPE
@WORKSPACE
@click.option(
    "--file",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Read the value from a file.",
)
@click.option("--env", "variable", metavar="VAR", help="Read it from an environment variable.")
def set_(
    client: Client,
    name: str,
    *,
    scope: str,
    workspace: str | None,
    file: Path | None,
    variable: str | None,
) -> Output:
    """Store a secret, or replace its value.

    The value comes from stdin, a file or an environment variable. A terminal asks for it and does not
    show it. One line break at its end is removed. A running run uses the new value within seconds.
    """
    check_secret_name(name)  # here, because a value that was given by mistake must not be sent
    body: Document = {"scope": scope, "value": _read_value(name, file, variable)}
    body |= {"workspace": workspace} if workspace else {}
    answer = client.put_json(f"/secrets/{path_segment(name)}", body)
    stored: Document = answer["secret"]
    return Output(
        answer,
        f"{stored['scope']} secret {stored['name']} is stored",
        f'use it in a TOML: [secrets] required = ["{stored["name"]}"]',
    )


@command(secret, "list", example="headrace secret list")
@WORKSPACE
def list_(client: Client, *, workspace: str | None) -> Output:
    """List your own secrets and those of workspaces."""
    answer = client.get("/secrets", {"workspace": workspace})
    rows = [
        (
            one["name"],
            one["scope"],
            one["workspace"] or "-",
            f"{time_ago(one['updated_at'])} by {one['updated_by']}",
            time_ago(one["used_at"]) if one["used_at"] else "never",
        )
        for one in answer["secrets"]
    ]
    columns = ("name", "scope", "workspace", "set", "last used")
    empty = "no secrets; store one with: headrace secret set NAME"
    return Output(answer, table("Secrets", columns, rows, empty=empty))


@command(secret, "delete", example="headrace secret delete SEARCH_KEY")
@click.argument("name", metavar="NAME")
@SCOPE
@WORKSPACE
def delete(client: Client, name: str, *, scope: str, workspace: str | None) -> Output:
    """Delete a secret. Samples of runs that require it fail from then on."""
    query = {"scope": scope, **({"workspace": workspace} if workspace else {})}
    answer = client.delete(f"/secrets/{path_segment(name)}", **query)
    return Output(answer, f"{scope} secret {name} is deleted")


@command(secret, "rotate-key", example="headrace secret rotate-key")
def rotate_key(client: Client) -> Output:
    """Wrap all stored secrets with the current key.

    Use it after the key was replaced. Every process needs the new key in HEADRACE_SECRET_KEY and the
    one before in HEADRACE_SECRET_KEYS_OLD. Afterwards nothing needs the old key any more.
    """
    answer = client.post("/secrets/rotate-key", {})
    return Output(
        answer,
        f"{answer['secrets']} secrets and {answer['connections']} values of connections are wrapped by "
        f"key {answer['key']}",
    )


def _read_value(name: str, file: Path | None, variable: str | None) -> str:
    """Return the value of a secret. Raises Failure, and never shows the value."""
    if file is not None and variable is not None:
        raise click.UsageError("--file and --env both name a value; give only one of them")
    if variable is not None:
        value = os.environ.get(variable)
        if value is None:
            raise Failure(
                "VALIDATION",
                f"the environment variable {variable} is not set; set it, or leave out --env and "
                "write the value to stdin",
            )
        return value
    if file is not None:
        with file.open("rb") as opened:
            return _decode(opened.read(MOST_VALUE_BYTES + 3))
    if sys.stdin.isatty():
        typed: str = click.prompt(f"value of {name}", hide_input=True, err=True)
        return typed
    return _decode(sys.stdin.buffer.read(MOST_VALUE_BYTES + 3))


def _decode(data: bytes) -> str:
    data = data.removesuffix(b"\n").removesuffix(b"\r")
    if len(data) > MOST_VALUE_BYTES:
        raise Failure("VALIDATION", "the value has more than 32 KiB; give a shorter one")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Failure(
            "VALIDATION", "the value is not text in UTF-8; encode it, for example as base64"
        ) from None
