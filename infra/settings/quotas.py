"""HEADRACE_QUOTAS, HEADRACE_ORGANISATION_QUOTAS and HEADRACE_KEY_QUOTAS: what each workspace, each
organisation and each API key may use."""

from collections.abc import Collection, Mapping

SAMPLES = "samples_in_flight"
BYTES = "stored_bytes"
VARIABLE = "HEADRACE_QUOTAS"
ORGANISATION_VARIABLE = "HEADRACE_ORGANISATION_QUOTAS"
KEY_VARIABLE = "HEADRACE_KEY_QUOTAS"

_OF_USE: Mapping[str, str] = {
    "runs_per_day": "runs and evaluations a day",
    "runs_at_once": "runs and evaluations at once",
    "requests_per_minute": "requests to the API a minute",
    "upload_bytes_per_day": "bytes of uploads a day",
}
_OF_THINGS: Mapping[str, str] = {BYTES: "stored bytes", "deployments": "deployments"}

QUOTAS: Mapping[str, str] = {**_OF_USE, SAMPLES: "samples in flight", **_OF_THINGS}
"""The names of the quotas of a workspace, and what each counts."""

ORGANISATION_QUOTAS: Mapping[str, str] = {
    **_OF_USE,
    **_OF_THINGS,
    "members": "members",
    "workspaces": "workspaces",
}
"""The names of the quotas of an organisation. Samples in flight belong to a workspace alone."""

KEY_QUOTAS = tuple(_OF_USE)
"""The quotas that an API key has, too. What is there belongs to its workspace and organisation."""

MOST_DIGITS = 15
FORM = "name=number pairs such as runs_per_day=100,runs_at_once=4; names: "


def parse_quotas(value: str, names: Collection[str] = QUOTAS) -> Mapping[str, int]:
    """Return quota -> limit, for the quotas that are named. Raises ValueError."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in value.split(","))):
        name, _, number = (piece.strip() for piece in part.partition("="))
        digits = number.isascii() and number.isdigit() and len(number) <= MOST_DIGITS
        if name not in names or name in found or not digits:
            raise ValueError(part)
        found[name] = int(number)
    return found
