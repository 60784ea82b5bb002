"""Regrades as people and programs see them: their state and figures, from their events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from schemas.events import (
    Event,
    GradientComparisonCompleted,
    GradientsCompared,
    RegradeCompleted,
    RegradePartGraded,
    RegradeRequested,
    RegradeStarted,
)
from schemas.events.regrades.figures import RegradeSums, add_by_step, report_of

RegradeStatus = Literal["waiting", "running", "finished", "failed"]
GradientStatus = Literal["running", "finished", "failed"]


@dataclass(frozen=True, slots=True)
class GradientsView:
    """The comparison of gradients: its state, and the figures of each step."""

    status: GradientStatus
    steps: tuple[GradientsCompared, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RegradeView:
    """A regrade as its events say. `commit` is the one whose grader was used. `by_step` are the sums of
    each step so far."""

    id: str
    request: RegradeRequested
    at: datetime
    status: RegradeStatus
    commit: str | None = None
    parts: int = 0
    by_step: Mapping[int, RegradeSums] = field(default_factory=dict)
    completed: RegradeCompleted | None = None
    gradients: GradientsView | None = None

    @property
    def run(self) -> str:
        return self.request.run


def view_regrade(request: RegradeRequested, at: datetime, events: Sequence[Event]) -> RegradeView:
    """Return the state of a regrade after these events."""
    started = next((one for one in events if isinstance(one, RegradeStarted)), None)
    parts = [one for one in events if isinstance(one, RegradePartGraded)]
    completed = next((one for one in events if isinstance(one, RegradeCompleted)), None)
    by_step: dict[int, RegradeSums] = {}
    for part in parts:
        by_step = add_by_step(by_step, part.by_step)
    status: RegradeStatus = "running" if started else "waiting"
    return RegradeView(
        id=request.regrade,
        request=request,
        at=at,
        status=completed.status if completed else status,
        commit=started.rollout.commit if started and request.config is not None else None,
        parts=len(parts),
        by_step=by_step,
        completed=completed,
        gradients=_gradients(completed, events),
    )


def _gradients(completed: RegradeCompleted | None, events: Sequence[Event]) -> GradientsView | None:
    if completed is None or not completed.gradients:
        return None
    steps = tuple(one for one in events if isinstance(one, GradientsCompared))
    ended = next((one for one in events if isinstance(one, GradientComparisonCompleted)), None)
    if ended is None:
        return GradientsView("running", steps)
    return GradientsView("failed" if ended.message else "finished", steps, ended.message)


def regrade_json(view: RegradeView) -> Mapping[str, object]:
    """A regrade as JSON, with the figures of all its steps."""
    request, completed, sums = view.request, view.completed, RegradeSums()
    for one in view.by_step.values():
        sums += one
    report = completed.report if completed and completed.report else None
    if report is None and sums.groups:
        report = report_of(sums)
    seconds = completed.seconds if completed else 0.0
    return {
        "id": view.id,
        "run": view.run,
        "base": request.base,
        "status": view.status,
        "source": request.source,
        "commit": view.commit or request.commit,
        "weights": request.weights,
        "rubrics": [rubric.name for rubric in request.rubrics],
        "steps": list(request.steps) if request.steps else None,
        "share": request.share,
        "threshold": request.threshold,
        "requester": request.requester,
        "created_at": view.at.isoformat(),
        "parts": view.parts or (completed.parts if completed else 0),
        "report": report.model_dump() if report else None,
        "by_step": {step: report_of(of).model_dump() for step, of in view.by_step.items()},
        "worst": [one.model_dump() for one in completed.worst] if completed else [],
        "ungraded": [one.model_dump() for one in completed.ungraded] if completed else [],
        "failures": completed.failures if completed else {},
        "seconds": seconds,
        "error": completed.message if completed else None,
        "gradients": _gradients_json(view.gradients),
    }


def _gradients_json(found: GradientsView | None) -> Mapping[str, object] | None:
    if found is None:
        return None
    steps = [one.model_dump(exclude={"regrade", "run"}) for one in found.steps]
    return {"status": found.status, "steps": steps, "error": found.error}
