"""Asks for confirmation before something is deleted permanently."""

import sys

import click

from producers.cli.errors import Failure


def confirm(what: str, *, yes: bool, as_json: bool) -> None:
    """Ask for confirmation, unless `yes` is set. Raises Failure when there is no terminal to ask on, and
    Abort when the answer is no."""
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise Failure("NOT_CONFIRMED", f"this would {what} permanently; confirm it with --yes")
    click.confirm(f"{what[0].upper()}{what[1:]} permanently?", abort=True, err=True)
