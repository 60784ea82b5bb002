"""HEADRACE_PRICES: what an hour of a device, a month of storage and a token cost, in US dollars."""

import math
from collections.abc import Mapping

VARIABLE = "HEADRACE_PRICES"
GPU_HOUR = "gpu_hour."
KEYS = ("cpu_hour", "gb_month", "call_tokens")
MOST = 1e9
FORM = "name=dollars pairs such as cpu_hour=0.04,gpu_hour.H100=2.5,gb_month=0.02,call_tokens=1"


def parse_prices(value: str) -> Mapping[str, float]:
    """Return prices by name. Raises ValueError, whose text says what is wrong with which part."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in value.split(","))):
        key, _, text = (piece.strip() for piece in part.partition("="))
        name = key.replace('"', "")
        if name not in KEYS and not (name.startswith(GPU_HOUR) and name != GPU_HOUR):
            raise ValueError(
                f"{key or 'the name'} is not a price; there are cpu_hour, gpu_hour.NAME, gb_month "
                "and call_tokens"
            )
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = _amount(part, text)
    return found


def _amount(part: str, text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not 0 <= amount <= MOST:  # not a number fails this, too
        raise ValueError(f"{part}: a price is a number of US dollars from 0 to {MOST:g}")
    return amount
