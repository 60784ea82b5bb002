"""JSON as datasets may write it."""

import json
import math
from typing import NoReturn


def loads(text: str) -> object:
    """Parse JSON. It rejects NaN and Infinity, which are not JSON, and lone surrogates, which UTF-8
    does not have. Raises ValueError, RecursionError."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(f"{digits} is too large")
        return value

    value: object = json.loads(text, parse_constant=refuse, parse_float=number)
    if "\\u" in text:
        _refuse_surrogates(json.dumps(value, ensure_ascii=False))
    return value


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"\\u{ord(text[error.start]):04x} is a lone surrogate, half of a character; write both "
            "surrogates of the character, or remove it"
        ) from None
