"""HEADRACE_QUOTAS and HEADRACE_KEY_QUOTAS: what each workspace and each API key may use."""

from collections.abc import Collection, Mapping

SAMPLES = "samples_in_flight"
VARIABLE = "HEADRACE_QUOTAS"
KEY_VARIABLE = "HEADRACE_KEY_QUOTAS"
QUOTAS: Mapping[str, str] = {
    "runs_per_day": "runs and evaluations a day",
    "runs_at_once": "runs and evaluations at once",
    "requests_per_minute": "requests to the API a minute",
    "upload_bytes_per_day": "bytes of uploads a day",
    SAMPLES: "samples in flight",
}
"""The names of the quotas, and what each counts."""

KEY_QUOTAS = tuple(name for name in QUOTAS if name != SAMPLES)
"""The quotas that an API key has, too. Samples in flight belong to a workspace alone."""

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
