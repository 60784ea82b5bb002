"""A whole run as events, for tests of the readers of events: requested, trained for some steps,
finished."""

from collections.abc import Iterator

from infra.blobs.artifacts import reference
from schemas.artifact_refs import ArtifactRef
from schemas.events import (
    BatchAssembled,
    CheckpointSaved,
    CommitRequested,
    Event,
    GroupGenerated,
    GroupGraded,
    GroupsRequested,
    PolicyInitialized,
    PolicyUpdated,
    RunFinished,
    RunRequested,
    RunStarted,
    StepSettled,
    WorkspaceSynced,
)
from schemas.ids import HEADRACE, GroupKey, Purpose, derive_id, run_stream
from schemas.sampling import Grade, Message, SampleBatch, SampleFailure, SampleOutput, SampleRecord
from schemas.specs import (
    BatchGroup,
    CommitSpec,
    DiscoveredRollout,
    Entrypoint,
    GroupSpec,
    GroupTemplate,
    Plan,
    SampleEntry,
    Slot,
    TrainSpec,
)
from tests.kit.specs import DATASET, MODEL, checkpoint_spec, config, ref, rollout_ref, version
from tests.kit.specs import template as group_template

WORKSPACE = "f" * 16


def batch_of(group: str, num_samples: int = 2) -> bytes:
    """The artifact of a group whose first sample succeeds and whose second fails."""
    answered = SampleRecord(
        index=0,
        messages=(
            Message(role="user", content="Say 3"),
            Message(role="assistant", content="3"),
        ),
        text="3",
        prompt_tokens=5,
        completion_tokens=2,
    )
    note = reference(b"a note")
    failed = SampleRecord(
        index=1,
        failure=SampleFailure.model_validate({"category": "timeout", "message": "slow"}),
        output=SampleOutput(stdout="began\n", traceback="ValueError", files={"note.txt": note}),
    )
    samples = (answered, failed, *(answered.model_copy(update={"index": n}) for n in range(2, 99)))
    return SampleBatch(group=group, samples=samples[:num_samples]).model_dump_json().encode()


def beginning(run: str, name: str, *, steps: int) -> Iterator[Event]:
    """The events before the first step."""
    yield RunRequested(
        run=run,
        run_name=name,
        config=config(),
        model=MODEL,
        dataset=DATASET,
        workspace=WORKSPACE,
    )
    push = CommitRequested(
        workspace=WORKSPACE,
        workspace_name="w",
        commit=CommitSpec(url="/repo"),
        entrypoints=(Entrypoint(rollout="say"),),
        requester=run_stream(run),
    )
    yield push
    yield WorkspaceSynced(
        workspace=WORKSPACE,
        request=derive_id(HEADRACE, run),
        commit="c" * 40,
        snapshot=ref("tree"),
        rollouts=(DiscoveredRollout(entrypoint=Entrypoint(rollout="say"), grader="Count"),),
        requester=run_stream(run),
    )
    spec = TrainSpec(run=run, config=config(), model=MODEL, total_steps=steps, dataset=DATASET)
    plan = Plan(total_steps=steps, batch_size=2, num_samples=2, num_rows=8)
    yield RunStarted(run=run, plan=plan, spec=spec, template=_template(run), commit="c" * 40)
    yield PolicyInitialized(run=run, spec=spec, state=version(0), versions={"torch": "2"})


def _template(run: str) -> GroupTemplate:
    return group_template().model_copy(update={"run": run, "rollout": rollout_ref()})


def step(run: str, number: int, *, groups: int = 2) -> Iterator[Event]:
    """The events of one step: its groups, its batch, its version, and the run's own events."""
    template = _template(run)
    slots = tuple(Slot(slot=slot, row=(number + slot) % 8) for slot in range(groups))
    yield GroupsRequested(
        owner=run, purpose=Purpose.TRAIN, step=number, slots=slots, template=template
    )
    held = []
    for slot in slots:
        group = str(GroupKey(run, Purpose.TRAIN, number, slot.slot))
        spec = GroupSpec(group=group, row=slot.row, template=template)
        artifact = reference(batch_of(group))
        yield from _group(spec, artifact)
        held.append(BatchGroup(slot=slot.slot, replacement=0, artifact=artifact, rewards=(1, None)))
    yield BatchAssembled(run=run, step=number, groups=tuple(held))
    state, metrics = version(number), {"rollout/raw_reward": number / 10, "train/loss": 0.5}
    yield PolicyUpdated(
        run=run,
        step=number,
        state=state,
        batch=derive_id(HEADRACE, f"{run}/{number}"),
        metrics=metrics,
        plan=(4,),
        versions={},
    )
    yield StepSettled(run=run, step=number, state=state, metrics=metrics)


def _group(spec: GroupSpec, artifact: ArtifactRef) -> Iterator[Event]:
    entries = (
        SampleEntry(index=0, prompt_tokens=5, completion_tokens=2),
        SampleEntry(index=1, failure="timeout", message="slow"),
    )
    yield GroupGenerated(spec=spec, entries=entries, parts=(artifact,))
    grades = (Grade(index=0, reward=1.0, parts={"exact": 1.0}), Grade(index=1, reward=None))
    yield GroupGraded(spec=spec, artifact=artifact, entries=entries, grades=grades)


def checkpoint(run: str, number: int, manifest: ArtifactRef) -> CheckpointSaved:
    """The checkpoint of a step."""
    spec = checkpoint_spec(number).model_copy(update={"run": run})
    return CheckpointSaved(spec=spec, manifest=manifest, reward=number / 10)


def whole_run(run: str, name: str, *, steps: int, groups: int = 2) -> Iterator[Event]:
    """A run from its request to its end, with a checkpoint at the last step."""
    yield from beginning(run, name, steps=steps)
    for number in range(1, steps + 1):
        yield from step(run, number, groups=groups)
    yield checkpoint(run, steps, ref("manifest"))
    yield RunFinished(run=run, step=steps, reward=steps / 10)
