"""`headrace login`, `logout` and `whoami`: an API key of a person, for this machine."""

import json
import os
import platform
import time
import webbrowser

import click

from infra.settings.settings import Settings
from producers.cli.client import Client, ServerAddress, forget_login, read_login, store_login
from producers.cli.command import command
from producers.cli.display.output import Document, Output, fields, say_aside
from producers.cli.display.units import minute
from producers.cli.errors import Failure

SLOWER_S = 5.0
NOT_YET = {"AUTHORIZATION_PENDING": 0.0, "SLOW_DOWN": SLOWER_S, "QUOTA_EXCEEDED": SLOWER_S}
"""The refusals after which a login asks again, and by how many seconds it then waits longer."""


@command(None, "login", example="headrace login")
@click.option("--no-browser", is_flag=True, help="Only print the address, and open no browser.")
@click.option("--name", metavar="NAME", help="The name of this machine. Default: its host name.")
def login(client: Client, *, no_browser: bool, name: str | None, as_json: bool) -> Output:
    """Sign in to the server at HEADRACE_URL, and store an API key of yours on this machine.

    Approve the code that is shown on the page of the server. The key ends after 90 days, and when you
    are not a member of the organisation any more.
    """
    settings = Settings.load(os.environ)
    if settings.api_key:
        raise Failure(
            "API_KEY_IS_SET",
            "HEADRACE_API_KEY is set, and commands would use it in place of the login; unset it first",
        )
    begun = client.post("/device/authorize", {"device_name": name or platform.node() or "device"})
    page, code = begun["verification_uri"], begun["user_code"]
    asked = {"verification_uri": page, "user_code": code}
    say_aside(json.dumps(asked) if as_json else f"Open {page} and enter the code {code}")
    if not no_browser:
        webbrowser.open(str(begun["verification_uri_complete"]))
    issued = _wait(client, begun)
    path = store_login(settings.home, settings.url, str(issued.pop("secret")))
    person, expires_at = issued["person"], issued["api_key"]["expires_at"]
    return Output(
        {**issued, "file": str(path)},
        f"signed in as {person['name']} ({person['email']}) until {minute(expires_at)}; the API key is "
        f"in {path}",
    )


def _wait(client: Client, begun: Document) -> Document:
    """Ask until the login is decided. Raises Failure when it was denied or took too long."""
    interval_s = float(begun["interval"])
    until = time.monotonic() + float(begun["expires_in"])
    while time.monotonic() < until:
        time.sleep(interval_s)
        try:
            return client.post("/device/token", {"device_code": begun["device_code"]})
        except Failure as error:
            if error.code not in NOT_YET:
                raise
            interval_s += NOT_YET[error.code]
    raise Failure("EXPIRED_TOKEN", "nobody approved the code in time; run `headrace login` again")


@command(None, "logout", example="headrace logout")
def logout() -> Output:
    """Revoke the API key that `headrace login` stored, and forget it."""
    settings = Settings.load(os.environ)
    api_key = read_login(settings.home, settings.url)
    if api_key is None:
        raise Failure(
            "NOT_SIGNED_IN", f"no login at {settings.url} is stored; there is nothing to do"
        )
    with Client(ServerAddress(settings.url, api_key)) as client:
        try:
            revoked: Document = client.delete("/api-keys/self")
        except Failure as error:
            if error.code != "UNAUTHORIZED":
                raise
            revoked = {"revoked": None}  # it was not valid any more
    forget_login(settings.home, settings.url)
    return Output({**revoked, "url": settings.url}, f"signed out at {settings.url}")


@command(None, "whoami", example="headrace whoami")
def whoami(client: Client) -> Output:
    """Show to whom the API key belongs that commands use, and what it allows."""
    found = client.get("/whoami")
    person, api_key = found["person"], found["api_key"]
    shown = [
        ("person", f"{person['name']} ({person['email']})" if person else None),
        ("owner", found["owner"]),
        ("organisation", found["organisation_name"] or "all"),
        ("role", found["role"]),
        ("workspace", found["workspace_name"] or "all"),
        ("API key", api_key["id"]),
        ("scopes", ", ".join(api_key["scopes"])),
        ("expires", minute(api_key["expires_at"]) if api_key["expires_at"] else "never"),
    ]
    return Output(found, fields("API key", [(name, value) for name, value in shown if value]))
