"""The state of a run as it was at an event of its log: its status, its step and its figures."""

from collections.abc import Mapping, Sequence

from infra.readmodel.state_at_event import StateAtEvent
from infra.spine.ports.event_log import Cursor, EventStore
from producers.core.history.run_status import TELLING, RunStatus, status_after
from schemas.events import (
    BatchAssembled,
    CheckpointSaved,
    EvaluationSettled,
    Event,
    GroupsRequested,
    PolicyInitialized,
    PolicyUpdated,
    RunFailed,
    RunPaused,
    RunRejected,
    RunRequested,
    RunResumed,
    RunStarted,
    RunWarned,
    StepSettled,
)
from schemas.ids import checkpoint_stream, policy_stream

State = Mapping[str, object]


OF_STEPS = (GroupsRequested, BatchAssembled, PolicyUpdated, StepSettled)
"""Of these each step of training has one."""


async def run_state_at(past: StateAtEvent, log: EventStore, run: str, at: Cursor) -> State:
    """The state of a run (its id) after its event at `at`, as names and values. A value that is not
    known yet is absent."""
    telling = [RunRequested.type, *(kind.type for kind in TELLING)]
    newest = [EvaluationSettled.type, RunWarned.type]
    places = await past.milestones(run, at, newest=newest, every=telling)
    places += await past.newest_of_steps(run, at, [kind.type for kind in OF_STEPS])
    places += await past.newest_of_stream(policy_stream(run), at)
    places += await past.newest_of_stream(checkpoint_stream(run), at)
    recorded = await log.events_at(list(dict.fromkeys(places)))
    known = [one for one in recorded if one.is_known]
    events = [one.event for one in sorted(known, key=lambda one: one.cursor)]
    return {**_status(events), **_figures(events)}


def _status(events: Sequence[Event]) -> State:
    """The status after all events that decide it."""
    if not events:
        return {}
    status = RunStatus()
    told: dict[str, object] = {}
    for event in events:
        status = status_after(status, event)
        match event:
            case RunFailed() | RunRejected():
                told["error"] = event.message
            case RunPaused() if event.reason:
                told["reason"] = event.reason
            case RunPaused() | RunResumed():
                told.pop("reason", None)
            case _:
                pass
    return {"status": status.text, **told}


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
