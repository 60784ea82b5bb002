"""How many examples the property tests try, and which.

`make test` tries the same few every time, so that no change fails by luck over something that it did
not touch. With HEADRACE_EXAMPLES=40 the examples are random and forty times as many, and a failure
prints the line (`@reproduce_failure`) that repeats it.
"""

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

VARIABLE = "HEADRACE_EXAMPLES"

USUAL = 50


def factor(text: str | None) -> int:
    """How many times as many examples as usual HEADRACE_EXAMPLES asks for, or 0 for the usual ones.
    Raises SystemExit unless it is a positive number."""
    if not text:
        return 0
    if not text.isdecimal() or int(text) == 0:
        raise SystemExit(f"{VARIABLE} must be a positive number, for example 40, got {text!r}")
    return int(text)


def profile(times: int) -> settings:
    """The settings of every property test, without those that `examples` replaces."""
    return settings(
        # How long an example takes says more about the machine than about the law.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=times == 0,
        database=None if times == 0 else settings.get_profile("default").database,
        print_blob=times > 0,
        max_examples=USUAL * (times or 1),
    )


def load() -> None:
    """Make the settings the default. Call it before a test is imported."""
    settings.register_profile("headrace", profile(factor(os.environ.get(VARIABLE))))
    settings.load_profile("headrace")


def prepare() -> None:
    """Let Hypothesis read the constants of all imported modules, which it does for the first property of
    a process and which takes seconds. Otherwise that test would count as slow."""

    @settings(max_examples=USUAL)
    @given(st.integers(), st.text())
    def holds(_number: int, _text: str) -> None:
        pass

    holds()


def examples(usual: int) -> settings:
    """Try `usual` examples, and as many times more as HEADRACE_EXAMPLES says."""
    return settings(max_examples=usual * (factor(os.environ.get(VARIABLE)) or 1))
