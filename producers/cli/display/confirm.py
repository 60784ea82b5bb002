"""Asking before something is deleted for good."""

import sys

import click

from producers.cli.errors import Failure


def confirm(what: str, *, yes: bool, as_json: bool) -> None:
    """Ask before something is gone for good. Raises Failure where nobody can be asked, and Abort when
    the answer is no."""
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise Failure("NOT_CONFIRMED", f"this would {what}, for good; say so with --yes")
    click.confirm(f"{what[0].upper()}{what[1:]}, for good?", abort=True, err=True)
