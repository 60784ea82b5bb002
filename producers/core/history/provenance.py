"""The provenance of a run: the code, the packages, the models and the data that its events name."""

from collections.abc import Mapping

from infra.readmodel.state_at_event import StateAtEvent
from infra.spine.ports.event_log import Cursor, EventStore
from producers.core.datasets.versions import name_of_version
from schemas.events import PolicyInitialized, RunRequested, RunStarted
from schemas.ids import policy_stream, run_stream
from schemas.models.fork import ForkPoint
from schemas.specs import RolloutRef

END = Cursor(2**62, 2**62)

Provenance = Mapping[str, str]


async def provenance_of(past: StateAtEvent, log: EventStore, run: str) -> Provenance:
    """Names and values that say with which code, packages, model and data a run (its id) works; empty
    before it started."""
    places = await past.milestones(run, END, newest=[RunStarted.type], every=[])
    recorded = await log.events_at([*places, (run_stream(run), 1), (policy_stream(run), 1)])
    found: dict[str, str] = {}
    for event in (one.event for one in recorded if one.is_known):
        match event:
            case RunRequested(fork=ForkPoint() as point) if places:
                found["fork of"] = f"{point.parent}, after step {point.step}"
            case RunStarted():
                found |= _rollout(event.template.rollout if event.template else None)
                found["model"] = event.spec.model.name
                if event.spec.teacher is not None:
                    found["teacher"] = event.spec.teacher.name
                data = event.spec.dataset
                named = name_of_version(data.name, data.version)
                found["dataset"] = f"{named}, {data.num_rows} rows, {data.content.sha256}"
            case PolicyInitialized():
                found |= {f"learner: {name}": value for name, value in event.versions.items()}
            case _:
                pass
    return found


def _rollout(rollout: RolloutRef | None) -> Provenance:
    if rollout is None:
        return {}
    found = {"commit": rollout.commit, "snapshot": rollout.snapshot.sha256}
    found |= {f"reward model: {one.name}": one.checkpoint for one in rollout.reward_models}
    packages = rollout.environment
    if packages is None:
        return found | {"packages": "the standard library only"}
    python = f"Python {packages.python} on {packages.platform}"
    return found | {"packages": f"{packages.packages} packages, {python}, {packages.key}"}
