"""How values look on a page. Each function is a filter of the templates."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2.filters import do_urlencode
from markupsafe import Markup

from schemas.text import model_name

ABSENT = "\N{EM DASH}"
CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
"""Control characters but tabs and line ends."""

DIRECTIONS = {
    code: f"\N{LEFT-POINTING ANGLE BRACKET}U+{code:04X}\N{RIGHT-POINTING ANGLE BRACKET}"
    for code in (0x200E, 0x200F, 0x061C, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
"""Characters that change the direction of text, and so could make a text look like another one."""

LONGEST_TEXT = 10_000
"""Characters of a text that a page shows. The API and the command line give the whole text."""

NOISE = 1e-8
"""A smaller number is the noise of its computation, and is shown as 0. JSON and CSV have it exactly."""

VISIBLE = {**CONTROLS, **DIRECTIONS}


def number(value: float | None, digits: int = 3) -> str:
    """A number with few digits, 0 for noise; a dash when it is missing."""
    if value is None:
        return ABSENT
    if abs(value) < NOISE:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "\N{THIN SPACE}")
    return (
        f"{value:.{digits}g}"
        if not 1 <= abs(value) < 1e15
        else f"{value:.{digits}f}".rstrip("0").rstrip(".")
    )


def interval(ends: Sequence[float]) -> str:
    low, high = ends
    return f"{number(low)} to {number(high)}"


def percent(part: float | None) -> str:
    return ABSENT if part is None else f"{100 * part:.0f}%"


def duration(seconds: float | None) -> str:
    """A length of time in its two largest units, like `3 min 20 s`."""
    if seconds is None:
        return ABSENT
    if not math.isfinite(seconds):
        return str(seconds)
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else "less than 1 ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    left = int(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 "))


def moment(at: datetime | None) -> Markup:
    """A time for people and for programs. A script turns it into the time of the browser's zone."""
    if at is None:
        return Markup(ABSENT)  # noqa: S704 - a constant
    at = at.astimezone(UTC)
    return Markup('<time datetime="{}">{} UTC</time>').format(
        at.isoformat().replace("+00:00", "Z"), at.strftime("%Y-%m-%d %H:%M:%S")
    )


def size(count: float | None) -> str:
    """A number of bytes in a unit that fits."""
    if count is None:
        return ABSENT
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def plain(text: object, most: int = LONGEST_TEXT) -> str:
    """At most this many characters of a text of users. Control characters and changes of direction can
    be seen in it, and surrogates that no encoding takes are replaced. Line ends of Windows are line
    ends."""
    found = str(text)
    cut = len(found) - most
    if cut > 0:
        found = f"{found[:most]}\N{HORIZONTAL ELLIPSIS} ({cut} more characters)"
    return _encodable(found.replace("\r\n", "\n")).translate(VISIBLE)


def model(value: object) -> str:
    """A model in few characters: of a path only the last part."""
    return model_name(str(value))


def url_part(value: object) -> str:
    """A text as a part of a path, or a dictionary as a query. Surrogates, which no encoding takes, are
    replaced."""
    if isinstance(value, Mapping):
        return do_urlencode({_encodable(key): _encodable(one) for key, one in value.items()})
    return do_urlencode(_encodable(value))


def _encodable(value: object) -> str:
    return str(value).encode("utf-8", "replace").decode()


def dollars(amount: float | None) -> str:
    """An amount of US dollars; small ones with more digits, and a dash for none."""
    if amount is None:
        return ABSENT
    return f"${amount:,.2f}" if amount >= 1 or amount == 0 else f"${amount:.4g}"


FILTERS: dict[str, Callable[..., Any]] = {
    "number": number,
    "interval": interval,
    "percent": percent,
    "duration": duration,
    "moment": moment,
    "size": size,
    "dollars": dollars,
    "plain": plain,
    "model": model,
    "shell": shlex.quote,
    "urlencode": url_part,
}
