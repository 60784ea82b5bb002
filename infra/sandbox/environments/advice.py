"""Chooses what a user is advised to do when uv could not choose or install the packages of a rollout, by
what uv says."""

from infra.sandbox.environments.uv_process import UvFailed

LONGEST_SAID = 1200
"""Characters of what uv says that are shown."""

AWAY = (
    *("error sending request", "dns error", "connection refused", "operation timed out"),
    *("request failed after", "failed to fetch", "could not connect", "network connectivity"),
)
BROKEN = "leave out the package that uv names, or name a version of it whose wheel is in order"
TOO_MUCH = (
    "leave out the package that was added last: the metadata of one of them is too much for uv"
)
LEAVE_OUT = (
    "name a version that has a wheel for this platform, or leave the package out by "
    "tool.uv.override-dependencies if it is not needed"
)
ADVICE_BROKEN = {
    "no usable wheels": LEAVE_OUT,
    "Failed to parse `uv.lock`": "run `uv lock` again",
    "memory allocation of": TOO_MUCH,
    "overflowed its stack": TOO_MUCH,
    "included as a URL dependency": (
        "leave out the package that uv names: it needs another one from an address, and packages come "
        "from the index only"
    ),
    "Failed to download": BROKEN,
    "Failed to install": BROKEN,
    "has invalid metadata": BROKEN,
    "has an invalid package format": BROKEN,
    "Package metadata name": BROKEN,
}
"""The advice about packages whose authors made a mistake, or mean harm. A new lock does not help."""

ADVICE = {
    "no wheels with": LEAVE_OUT,
    "was not found in the package registry": "correct the name, or use an index that has it",
    "No solution found": "change the versions that do not fit together",
}
"""The advice about packages that cannot be chosen."""

ADVICE_LOCKED = "run `uv lock` for this platform and Python too, or remove uv.lock"
"""The advice about chosen packages that do not fit: only a lock of the author chooses such."""


def advise(failed: UvFailed, *, is_locked: bool) -> str:
    """Return the advice to the user about an error of uv. `is_locked` means that the versions were
    chosen."""
    said = shorten(failed)
    if (broken := _find(ADVICE_BROKEN, said)) is not None:
        return broken
    return ADVICE_LOCKED if is_locked else _find(ADVICE, said) or "correct them"


def is_away(failed: UvFailed) -> bool:
    """Whether the index was not reached."""
    lower = str(failed).lower()
    return failed.is_away or any(sign in lower for sign in AWAY)


def shorten(failed: UvFailed) -> str:
    """The beginning of what uv says."""
    return str(failed)[:LONGEST_SAID]


def _find(advice: dict[str, str], said: str) -> str | None:
    return next((what for sign, what in advice.items() if sign in said), None)
