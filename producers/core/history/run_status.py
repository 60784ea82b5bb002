"""The status of a run from its events: whether it waits, runs, rests or has ended, and what it was
asked to do."""

from dataclasses import dataclass, replace

from schemas.events import (
    BudgetExhausted,
    Event,
    RunArchived,
    RunFailed,
    RunFinished,
    RunPaused,
    RunPauseRequested,
    RunRejected,
    RunResumed,
    RunResumeRequested,
    RunStarted,
    RunStopped,
    RunStopRequested,
)

TELLING: tuple[type[Event], ...] = (
    RunRejected,
    RunStarted,
    RunPauseRequested,
    BudgetExhausted,
    RunPaused,
    RunResumeRequested,
    RunResumed,
    RunStopRequested,
    RunStopped,
    RunFailed,
    RunFinished,
    RunArchived,
)
"""The events that change where a run stands."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run stands. `ended` says how it ended; `pausing`, `resuming` and `stopping` mean that it
    is asked to and has not done it yet. `exhausted` is the limit of its budget for which it paused."""

    started: bool = False
    ended: str | None = None
    paused: bool = False
    pausing: bool = False
    resuming: bool = False
    stopping: bool = False
    exhausted: BudgetExhausted | None = None

    @property
    def text(self) -> str:
        """The status in words, such as `paused, to be stopped`."""
        if self.ended is not None:
            return self.ended
        status = "paused" if self.paused else "running" if self.started else "pending"
        if self.stopping:
            return f"{status}, to be stopped"
        if self.pausing and not self.paused:
            return f"{status}, to be paused"
        return f"{status}, to be resumed" if self.resuming else status


def status_after(status: RunStatus, event: Event) -> RunStatus:
    """Where the run stands after the next event of its log."""
    match event:
        case RunStarted():
            return replace(status, started=True)
        case RunPauseRequested():
            return replace(status, pausing=True)
        case BudgetExhausted():
            return replace(status, exhausted=event)
        case RunPaused():
            return replace(status, paused=True, pausing=False)
        case RunResumeRequested():
            return replace(status, pausing=False, resuming=status.paused)
        case RunResumed():
            return replace(status, paused=False, resuming=False, exhausted=None)
        case RunStopRequested():
            return replace(status, stopping=True)
        case RunStopped():
            return RunStatus(ended="stopped")
        case RunFinished():
            return RunStatus(ended="finished")
        case RunFailed():
            return RunStatus(ended="crashed" if event.kind == "crash" else "failed")
        case RunRejected():
            return RunStatus(ended="failed")
        case RunArchived():
            return RunStatus(ended="archived")
        case _:
            return status
