"""Level `gvisor`: the command runs on a kernel of its own, gVisor's, which is an ordinary process.

A fault in the kernel of this machine cannot be reached from it, because none of its system calls gets
there. gVisor itself runs in namespaces that bubblewrap makes, as at level `bwrap`, without a network and
as a user without rights. Whoever breaks out of it finds an empty place.
"""

from contextlib import ExitStack
from pathlib import Path

from infra.sandbox.levels.bubblewrap import BubblewrapLevel
from infra.sandbox.levels.bubblewrap_options import BubblewrapPlan
from infra.sandbox.levels.gvisor_options import plan_gvisor
from infra.sandbox.levels.level import ConfinedCommand


class GVisorLevel(BubblewrapLevel):
    """`infra.sandbox.levels.level.Level` by the programs bubblewrap and runsc."""

    name = "gvisor"

    def __init__(self, bubblewrap: Path, runsc: Path) -> None:
        super().__init__(bubblewrap)
        self._runsc = runsc

    def _plan(self, command: ConfinedCommand, held: ExitStack, *, counted: bool) -> BubblewrapPlan:
        """A command with a network, or that writes files of ours, is one of the platform's own (git). It
        needs bubblewrap alone."""
        if command.network or command.writable:
            return super()._plan(command, held, counted=counted)
        return plan_gvisor(self._runsc, command, held)
