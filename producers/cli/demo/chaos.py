"""`headrace demo --chaos`: repeat the training while a random worker is killed every few seconds.

A worker is killed only if the run has made progress since the last kill, so the run ends even on a slow
machine. The supervisor restarts processes that die. No other process is informed of the kills.
"""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.operations.local.home import read_state
from producers.cli.client import Client, path_segment
from producers.cli.errors import Failure

POLL_S = 0.2
LONGEST_PAUSE_S = 4.0


class Killer(threading.Thread):
    """Kills (-9) the processes of a platform, but never its supervisor, until `stop` is called."""

    def __init__(
        self, home: Path, client: Client, run: str, *, seed: int, say: Callable[[str], None]
    ) -> None:
        super().__init__(daemon=True, name="killer")
        self.deaths: list[str] = []
        self._home = home
        self._client = client
        self._run = run
        self._say = say
        self._draw = random.Random(seed)  # noqa: S311 - which process dies need not be secret
        self._over = threading.Event()

    def run(self) -> None:
        seen = -1
        while not self._over.wait(POLL_S):
            step = self._step()
            if step is None or step <= seen:
                continue
            seen = step
            if self._over.wait(self._draw.uniform(0, LONGEST_PAUSE_S)):
                return
            self._kill(step)

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _step(self) -> int | None:
        """The run's current step, or None while the server does not answer."""
        try:
            return int(
                self._client.get(f"/runs/{path_segment(self._run)}")["run"]["current_step"] or 0
            )
        except Failure:
            return None

    def _kill(self, step: int) -> None:
        state = read_state(self._home)
        alive = [child for child in state.children if child.pid] if state else []
        if not alive:
            return
        victim = self._draw.choice(alive)
        try:
            os.kill(victim.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.deaths.append(victim.name)
        self._say(f"kill -9 {victim.pid} ({victim.name}) at step {step}")


@contextmanager
def killing(killer: Killer) -> Iterator[Killer]:
    """Run the killer until the end of the block."""
    killer.start()
    try:
        yield killer
    finally:
        killer.stop()
