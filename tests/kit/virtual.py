"""An event loop with a time of its own: it never sleeps, and jumps to whatever is due next. What happens
in it is a function of the seeds it was given, timers included; nothing in it may do real IO."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Never waits. `waited_s` is the sum of the seconds that it should have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits, and nothing is due: it hangs"
        self.waited_s += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._made = _Selector()
        super().__init__(self._made)

    def time(self) -> float:
        return self._made.waited_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in simulated time. Raises AssertionError when all tasks wait and no timer is due."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
