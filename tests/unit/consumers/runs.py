"""A run as its decider sees it: the messages it receives, the replies of other consumers, and its
story so far."""

from typing import Any, TypeVar
from uuid import UUID

from consumers.run.consumer import CONSUMER
from infra.spine.runtime.consumer import Incoming
from schemas.errors import FailureCategory
from schemas.events import (
    CheckpointRequested,
    CheckpointSaved,
    EvaluationCompleted,
    EvaluationRequested,
    Event,
    GroupGraded,
    GroupsRequested,
    PolicyInitialized,
    PolicyUpdated,
    RunPauseRequested,
    RunRequested,
    RunResumeRequested,
    RunStarted,
    RunStopRequested,
    WorkspaceSynced,
)
from schemas.ids import run_stream
from schemas.sampling import Grade, SampleFailure
from schemas.specs import DiscoveredRollout, Entrypoint, GroupSpec, SampleEntry
from tests.kit.decider import Given, When, given
from tests.kit.specs import DATASET, MODEL, config, ref, version

E = TypeVar("E", bound=Event)
STREAM = run_stream("r1")
RL = {
    "training": {"n_samples_per_prompt": 2, "rollout_batch_size": 2},
    "checkpoints": {"checkpoint_save_freq": 2},
}


def requested(
    *, steps: int = 3, validate: bool = False, **sections: dict[str, Any]
) -> RunRequested:
    merged = {**RL, **sections}
    merged["advanced"] = {"max_steps": steps, **sections.get("advanced", {})}
    if validate:
        merged["checkpoints"] = {"checkpoint_save_freq": 100, "eval_interval": 2}
    return RunRequested(
        run="r1",
        run_name="first",
        config=config(**merged),
        model=MODEL,
        dataset=DATASET,
        validation=DATASET if validate else None,
        workspace="w1",
    )


def taught(*, steps: int = 3) -> RunRequested:
    sft = {"algorithm": "sft", "max_steps": steps, "batch_size": 4}
    return RunRequested(
        run="r1",
        run_name="sft",
        config=config(advanced=sft, checkpoints={"checkpoint_save_freq": 2}),
        model=MODEL,
        dataset=DATASET,
    )


def synced(**changes: Any) -> WorkspaceSynced:
    found = {"entrypoint": Entrypoint(rollout="say"), "workflow": "Say", "grader": "Count"}
    return WorkspaceSynced(
        workspace="w1",
        request=UUID(int=1),
        commit="c" * 40,
        snapshot=ref("tree"),
        rollouts=(DiscoveredRollout.model_validate({**found, **changes}),),
        requester=STREAM,
    )


def initialized() -> PolicyInitialized:
    spec = given(CONSUMER, requested()).when(synced()).events[0]
    assert isinstance(spec, RunStarted)
    return PolicyInitialized(
        run="r1", spec=spec.spec, state=version(0), versions={"torch": "2"}, files={"f": ref("f")}
    )


def graded(
    spec: GroupSpec,
    *rewards: float | None,
    failure: str | None = None,
    message: str | None = None,
    grader: str | None = None,
    truncated: bool = False,
) -> GroupGraded:
    """A graded group. `grader` is the error of its grader, for each sample without a reward."""
    rewards = rewards or (0.0, 1.0)
    entries = tuple(
        SampleEntry(
            index=n, failure=failure, message=message, completion_tokens=3, truncated=truncated
        )
        for n in range(len(rewards))
    )
    return GroupGraded(
        spec=spec,
        artifact=ref(f"group {spec.group}"),
        entries=entries,
        grades=tuple(_grade(n, reward, grader) for n, reward in enumerate(rewards)),
    )


def _grade(index: int, reward: float | None, grader: str | None) -> Grade:
    if reward is not None or grader is None:
        return Grade(index=index, reward=reward)
    failure = SampleFailure(category=FailureCategory.GRADER, message=grader)
    return Grade(index=index, reward=None, failure=failure)


def updated(step: int, *, durable: bool = True) -> PolicyUpdated:
    return PolicyUpdated(
        run="r1",
        step=step,
        state=version(step, durable=durable),
        batch=UUID(int=step),
        metrics={"train/loss": 0.5},
        plan=(12,),
        versions={"torch": "2"},
    )


def saved(request: CheckpointRequested) -> CheckpointSaved:
    return CheckpointSaved(spec=request.spec, manifest=ref(f"manifest {request.spec.step}"))


def validated(request: EvaluationRequested, reward: float = 0.5) -> EvaluationCompleted:
    return EvaluationCompleted(
        evaluation=request.evaluation,
        status="finished",
        reward=reward,
        metrics={"eval/reward/low": reward - 0.1, "eval/reward/high": reward + 0.1},
        run="r1",
        step=request.step,
    )


class Story:
    """A run that receives one message after another, and replies to its requests as the other
    consumers would."""

    def __init__(self, request: RunRequested) -> None:
        self.world: Given = given(CONSUMER, request)
        self.told: list[Event] = []

    def tell(self, message: Incoming) -> When:
        if isinstance(message, (RunPauseRequested, RunResumeRequested, RunStopRequested)):
            self.world = Given(CONSUMER, (*self.world.events, message))
        said = self.world.when(message)
        self.world = said.after()
        self.told += said.events
        assert self.world.when(message).events == [], "a duplicate decides nothing"
        return said

    def begin(self) -> When:
        self.tell(synced())
        return self.tell(initialized())

    def step(self, request: GroupsRequested, *, durable: bool = True) -> When:
        """Grade all groups of a request, then take the step."""
        for spec in request.group_specs():
            self.tell(graded(spec))
        return self.tell(updated(request.step, durable=durable))


def only(said: When, kind: type[E]) -> list[E]:
    return [event for event in said.events if isinstance(event, kind)]
