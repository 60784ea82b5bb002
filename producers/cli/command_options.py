"""Values of options that several commands parse."""

import re

from producers.cli.errors import Failure

AGE = re.compile(r"(\d{1,6})([smhdw])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


def parse_age_s(text: str, *, option: str = "--older-than") -> int:
    """An age such as `30d`, in seconds. Raises Failure when the text is not an age."""
    parts = AGE.fullmatch(text)
    if parts is None:
        raise Failure(
            "INVALID_OPTION",
            f"{option} {text!r} is not an age; write a whole number and s, m, h, d or w, like 30d",
        )
    return int(parts[1]) * SECONDS[parts[2]]
