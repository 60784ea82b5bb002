"""A limit for log messages that clients can cause as often as they like. Each is written at most once a
minute."""

import logging
import time
from collections.abc import Callable

EVERY_S = 60.0
MOST_KEYS = 256
"""How many different messages are counted separately. Further ones share one count."""


class RateLimit(logging.Filter):
    """Lets each message through once per `every_s` seconds, and adds how often it was suppressed since.
    Two messages are the same if they have the same template and their exceptions come from the same
    line."""

    def __init__(
        self, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        self._last: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = f"{record.msg} {_raised_at(record)}"
        key = key if key in self._last or len(self._last) < MOST_KEYS else ""
        now = self._clock()
        at, held = self._last.get(key, (now - self._every_s, 0))
        if now - at < self._every_s:
            self._last[key] = (at, held + 1)
            return False
        self._last[key] = (now, 0)
        if held:
            record.msg = f"{record.getMessage()} (and {held} times more since it was last logged)"
            record.args = ()
        return True


def _raised_at(record: logging.LogRecord) -> str:
    trace = record.exc_info[2] if record.exc_info else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
