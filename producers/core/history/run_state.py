"""The state of a run as it was at an event of its log: its status, its step, its figures, and what had
happened so often."""

from collections.abc import Mapping, Sequence

from infra.ports.event_log import Cursor, EventStore, Recorded
from infra.readmodel.moments import Moments, places
from schemas.events import (
    BatchAssembled,
    CheckpointSaved,
    EvaluationSettled,
    Event,
    GroupsRequested,
    PolicyInitialized,
    PolicyUpdated,
    RunApproved,
    RunArchived,
    RunFailed,
    RunFinished,
    RunPaused,
    RunPauseRequested,
    RunRejected,
    RunRequested,
    RunRestored,
    RunResumed,
    RunResumeRequested,
    RunStarted,
    RunStopped,
    RunStopRequested,
    RunWarned,
    StepSettled,
)

STATUSES: Mapping[type[Event], str] = {
    RunRequested: "pending",
    RunApproved: "pending",
    RunRejected: "failed",
    RunStarted: "running",
    RunPauseRequested: "running, to be paused",
    RunPaused: "paused",
    RunResumeRequested: "paused, to be resumed",
    RunResumed: "running",
    RunStopRequested: "running, to be stopped",
    RunStopped: "stopped",
    RunFailed: "failed",
    RunFinished: "finished",
    RunArchived: "archived",
    RunRestored: "restored",
}
"""The status of a run after an event."""

State = Mapping[str, object]


async def run_state_at(moments: Moments, log: EventStore, run: str, at: Cursor) -> State:
    """The state of a run (its id) after its event at `at`, as names and values. A value that is not
    known yet is absent."""
    newest = await moments.newest(run, at)
    recorded = await log.events_at(places(newest))
    counts = {f"events/{one.type}": one.count for one in sorted(newest, key=lambda one: one.type)}
    return {**_status(recorded), **_figures([one.event for one in recorded]), **counts}


def _status(recorded: Sequence[Recorded]) -> State:
    """The status after the newest event that decides it."""
    deciding = [one for one in recorded if type(one.event) in STATUSES]
    if not deciding:
        return {}
    newest = max(deciding, key=lambda one: one.cursor)
    found: dict[str, object] = {"status": STATUSES[type(newest.event)]}
    if isinstance(newest.event, RunFailed | RunRejected):
        found["error"] = newest.event.message
    if isinstance(newest.event, RunPaused) and newest.event.reason:
        found["reason"] = newest.event.reason
    return found


def _figures(events: Sequence[Event]) -> State:
    """The progress of the run, from the newest event of each type."""
    found: dict[str, object] = {}
    for event in events:
        match event:
            case RunStarted():
                found["total steps"] = event.plan.total_steps
            case GroupsRequested():
                found["sampled up to step"] = event.step
            case BatchAssembled():
                found["batch of step"] = event.step
            case PolicyInitialized():
                found.setdefault("policy version", 0)
            case PolicyUpdated():
                found["policy version"] = event.step
            case StepSettled():
                found["step"] = event.step
                found |= {f"metric/{key}": value for key, value in event.metrics.items()}
            case CheckpointSaved():
                found["checkpoint at step"] = event.spec.step
            case EvaluationSettled():
                found["validated at step"] = event.step
                found["validation reward"] = event.reward
            case RunWarned():
                found["warning"] = event.message
            case _:
                pass
    return dict(sorted(found.items()))


def changes(before: State, after: State) -> dict[str, tuple[object, object]]:
    """The names whose values differ: what they were, and what they are; None where one has no value."""
    return {
        name: (before.get(name), after.get(name))
        for name in dict.fromkeys([*after, *before])
        if before.get(name) != after.get(name)
    }
