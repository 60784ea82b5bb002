"""HEADRACE_CAPACITY: how much work of each lane a process holds at once, if the operator says so.
HEADRACE_RUN_CAPACITY: how much of it all processes together hold of one run."""

from collections.abc import Mapping

VARIABLE = "HEADRACE_CAPACITY"
RUN_VARIABLE = "HEADRACE_RUN_CAPACITY"
LANES = ("control", "submit", "user", "generate", "train", "serve", "export")
MOST = 65536
FORM = f"lane=number pairs such as generate=256,user=16, with numbers from 1 to {MOST}; lanes: " + (
    ", ".join(LANES)
)


def parse_capacity(value: str) -> Mapping[str, int]:
    """Return lane -> the most that a process holds of it, for the lanes that are named. Raises
    ValueError."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in value.split(","))):
        lane, _, number = (piece.strip() for piece in part.partition("="))
        digits = number.isascii() and number.isdigit() and len(number) <= 5
        if lane not in LANES or lane in found or not digits or not 1 <= int(number) <= MOST:
            raise ValueError(part)
        found[lane] = int(number)
    return found
