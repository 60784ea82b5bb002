"""Tells people that a command still waits, so that a long one is not silent.

The lines go to stderr, because stdout may be the input of another program.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from producers.cli.display.output import say_aside
from producers.cli.display.units import format_duration

FIRST_S, EACH_S = 3.0, 30.0
"""Seconds until the first line, and between two lines."""


@contextmanager
def told_while_waiting(describe: Callable[[], str], *, quiet: bool = False) -> Iterator[None]:
    """Print `describe()` to stderr inside of the block, unless `quiet`: first after FIRST_S, and then
    every EACH_S. `describe` runs in another thread."""
    if quiet:
        yield
        return
    done = threading.Event()
    started = time.monotonic()

    def tell() -> None:
        pause = FIRST_S
        while not done.wait(pause):
            pause, said = EACH_S, describe()
            if not done.is_set():
                say_aside(f"{said} ({format_duration(time.monotonic() - started)} so far)")

    threading.Thread(target=tell, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        done.set()
