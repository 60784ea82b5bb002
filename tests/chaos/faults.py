"""Faults carried out: kills, pauses, and members that leave and join again, each at its moment."""

import random
import signal
import time
from collections.abc import Sequence
from functools import partial

from tests.chaos.plan import JOIN, Kill, Pause
from tests.chaos.scene import Scene
from tests.chaos.syncs import Syncs
from tests.chaos.victims import GIT, caught, kill, signalled
from tests.kit.platform import eventually

SHORT_LIVED = (GIT, "discover")
PAUSED = " stops for "
NOT_KEPT = ("supervisor", "postmaster", "broker")
"""Processes that are not restarted by themselves, or not on every stack."""


class Faults:
    """The faults of one trial. `did` says it, in order; `at` when (Unix time)."""

    def __init__(self, scene: Scene, draw: random.Random, *, syncs: Syncs) -> None:
        self._scene = scene
        self._draw = draw
        self.syncs = syncs
        self.did: list[str] = []
        self.at: list[float] = []
        self._stopped: list[tuple[float, list[int]]] = []

    def carry_out(self, faults: Sequence[Kill | Pause]) -> None:
        """All of them, each so long after now as it says."""
        begun = time.monotonic()
        for fault in faults:
            self._until(begun + fault.after_s)
            if isinstance(fault, Pause):
                self._pause(fault)
            elif fault.target == JOIN:
                self._note(JOIN)
                self._scene.join_again()
            else:
                self._kill(fault.target)
        while self._stopped:
            self._until(self._stopped[0][0])

    def undo(self) -> None:
        """Continue whatever still stands."""
        for _, pids in self._stopped:
            signalled(pids, signal.SIGCONT)
        self._stopped.clear()

    def counted(self, ended_at: float | None) -> dict[str, int]:
        """How many faults met a process before the run had ended (Unix time; None: it did not)."""
        done = [
            said
            for said, at in zip(self.did, self.at, strict=True)
            if said != JOIN and (ended_at is None or at < ended_at)
        ]
        pauses = sum(PAUSED in said for said in done)
        return {"kills": len(done) - pauses, "pauses": pauses}

    def _note(self, said: str) -> None:
        self.did.append(said)
        self.at.append(time.time())

    def _until(self, moment: float) -> None:
        """Sleep until then, continuing what is due meanwhile."""
        while self._stopped and self._stopped[0][0] <= moment:
            due, pids = self._stopped.pop(0)
            time.sleep(max(0.0, due - time.monotonic()))
            signalled(pids, signal.SIGCONT)
        time.sleep(max(0.0, moment - time.monotonic()))

    def _pause(self, pause: Pause) -> None:
        met = []
        for target, for_s in pause.stops:
            pids = self._scene.processes.stopped_together(target, self._draw)
            if there := signalled(pids, signal.SIGSTOP):
                self._stopped.append((time.monotonic() + for_s, there))
                met.append(f"{target} {there[0]}{PAUSED}{for_s} s")
        self._stopped.sort()
        if met:
            self._note(", ".join(met))

    def _kill(self, target: str) -> None:
        if target in SHORT_LIVED:
            self.syncs.push()
            died = caught(self._scene.processes, target, self._draw)
        else:
            died = kill(self._scene.processes, target, self._draw)
        if died is None:
            return
        self._note(died)
        if target in NOT_KEPT:
            eventually(partial(self._ended, target), within_s=60, what=f"the {target} ended")
            self._scene.mend()

    def _ended(self, target: str) -> bool | None:
        """Whether what was killed is gone, where we are to start it again."""
        parts = self._scene.components
        if target == "supervisor":
            ended = any(one.process.poll() is not None for one in self._scene.platforms)
        elif parts is None:
            ended = True
        elif target == "postmaster":
            ended = not parts.postgres.running
        else:
            ended = parts.kafka.process is None or parts.kafka.process.poll() is not None
        return True if ended else None
