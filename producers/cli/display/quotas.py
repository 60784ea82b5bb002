"""The quotas of an organisation or a workspace as a table, and the limits that a command sets."""

from collections.abc import Mapping, Sequence

from producers.cli.display.output import Document, Part, table
from producers.cli.display.units import minute
from producers.cli.errors import Failure

FREES = {
    "runs_at_once": "when a run ends",
    "samples_in_flight": "when a sample ends",
    "stored_bytes": "when a dataset is deleted",
    "deployments": "when one is undeployed",
    "members": "when one is removed",
    "workspaces": "never",
}
"""When a quota of what is there at once frees."""


def limits_of(texts: Sequence[str]) -> Mapping[str, str]:
    """The limits that the texts QUOTA=LIMIT name. Raises Failure."""
    return dict(_pair(text) for text in texts)


def quotas_table(name: str, quotas: Sequence[Document]) -> Part:
    """A table of quotas."""
    columns = ("of", "quota", "limit", "used", "frees")
    return table(f"Quotas of {name}", columns, [_row(one) for one in quotas])


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise Failure("INVALID_OPTION", f"--set {text!r} must be QUOTA=LIMIT, like runs_at_once=4")
    return name, value


def _row(one: Document) -> tuple[object, ...]:
    frees = one["frees_at"]
    return (
        one["holder"],
        one["name"],
        "unlimited" if one["most"] is None else one["most"],
        one["used"],
        minute(frees) if frees else FREES[one["name"]],
    )
