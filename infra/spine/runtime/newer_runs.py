"""Which runs only a newer release may decide on, remembered for each run that was seen."""

from collections.abc import Collection

from infra.spine.ports.effects import Effects

MOST = 16_384
"""The most runs that are remembered."""


class NewerRuns:
    """The runs and evaluations that need a newer decider version than that of this process
    (`schemas/events/decider_version.py`). A run has its version from its first event on, and keeps it.
    So the database is asked once for each run."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._known: dict[str, bool] = {}

    async def among(self, runs: Collection[str]) -> frozenset[str]:
        """Return those of these runs that are left for a newer release. Each has an event in the log."""
        unknown = [run for run in runs if run not in self._known]
        if not unknown:
            return frozenset(run for run in runs if self._known[run])
        newer = await self._effects.runs_of_newer(unknown)
        if len(self._known) > MOST:
            self._known.clear()
        self._known.update((run, run in newer) for run in unknown)
        return newer | {run for run in runs if self._known.get(run)}

    def clear(self) -> None:
        """Forget everything, because the log has another history now."""
        self._known.clear()
