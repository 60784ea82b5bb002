"""An ended run with all of its artifacts, for tests that archive, remove or restore it."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from infra.blobs.artifacts import reference
from schemas.artifact_refs import ArtifactRef
from schemas.datasets import DatasetRow
from schemas.events import (
    EvaluationCompleted,
    EvaluationRequested,
    EvaluationSettled,
    EvaluationStarted,
    Event,
    GroupGenerated,
    GroupGraded,
    PolicyUpdated,
    RunFinished,
    RunRequested,
)
from schemas.ids import GroupKey, Purpose
from schemas.sampling import Grade, Message
from schemas.specs import GroupSpec, GroupTemplate, PushOrigin, SampleEntry
from tests.kit.application import Application
from tests.kit.specs import DATASET, ref
from tests.kit.specs import template as group_template
from tests.kit.story import WORKSPACE, batch_of, checkpoint, whole_run

STEPS = 3
TEXTS = ("rows", "tree", "{}", *(f"{kind}{step}" for kind in "ws" for step in range(STEPS + 1)))
"""The contents of the references of `tests/kit/specs.py`."""


async def ended_run(
    app: Application,
    run: str = "r1",
    name: str = "first",
    *,
    workspace: str | None = None,
    origin: PushOrigin | None = None,
) -> None:
    """A finished run of three steps with a validation, a checkpoint and blobs of its own. It belongs to
    `workspace` (an id), or to the workspace of `tests/kit/specs.py`. `origin` is the push that began
    it."""
    artifacts = app.services.artifacts
    rows = [
        DatasetRow(prompt=(Message(role="user", content=f"Say {n}"),), label=str(n))
        for n in range(8)
    ]
    content = await artifacts.put_artifact(
        b"".join(row.to_line() for row in rows), run="d", blob=True
    )
    manifest = await artifacts.put_artifact(f'"manifest of {run}"'.encode(), run=run, blob=True)
    weights = await artifacts.put_artifact(f"weights of {run}".encode(), run=run, blob=True)
    names = app.services.readmodel.names
    await names.take("run", name, run, scope=workspace or WORKSPACE)
    for text in TEXTS:
        await keep(app, text.encode())
    for event in whole_run(run, name, steps=STEPS):
        match event:
            case RunRequested():
                dataset = DATASET.model_copy(update={"content": content})
                event = event.model_copy(update={"dataset": dataset, "origin": origin})
            case PolicyUpdated(step=2):
                state = event.state.model_copy(update={"weights": weights})
                event = event.model_copy(update={"state": state, "pinned": True})
            case GroupGenerated():
                await keep(app, batch_of(event.spec.group))
            case RunFinished():
                for one in (checkpoint(run, STEPS, manifest), *validation(run)):
                    await app.services.log.append([one], cause=uuid4())
                await keep(app, batch_of(str(GroupKey(f"{run}v", Purpose.EVALUATE, 0, 0))))
            case _ if event.type == "rl.checkpoint.saved":
                continue
        if workspace is not None and "workspace" in type(event).model_fields:
            event = event.model_copy(update={"workspace": workspace})
        [recorded] = await app.services.log.append([event], cause=uuid4())
    assert await app.services.readmodel.caught_up(recorded.cursor, timeout_s=60)


def validation(run: str) -> Iterator[Event]:
    """A validation of one group that the run requested."""
    evaluation = f"{run}v"
    template = group_template().model_copy(update={"run": run})
    asked: dict[str, Any] = {
        "evaluation": evaluation,
        "template": template,
        "rows": (0,),
        "run": run,
        "step": 3,
    }
    yield EvaluationRequested(eval_name=f"{run}-3", **asked)
    yield EvaluationStarted(batch_size=8, pass_threshold=1.0, **asked)
    yield _grade_event(evaluation, template)
    yield EvaluationCompleted(
        evaluation=evaluation, run=run, step=3, status="finished", reward=1.0, metrics={}
    )
    yield EvaluationSettled(run=run, step=3, reward=1.0, metrics={})


def _grade_event(evaluation: str, template: GroupTemplate) -> GroupGraded:
    group = str(GroupKey(evaluation, Purpose.EVALUATE, 0, 0))
    return GroupGraded(
        spec=GroupSpec(group=group, row=0, template=template),
        artifact=reference(batch_of(group)),
        entries=(SampleEntry(index=0), SampleEntry(index=1, failure="timeout")),
        grades=(Grade(index=0, reward=1.0), Grade(index=1, reward=None)),
    )


async def keep(app: Application, data: bytes) -> ArtifactRef:
    """Store a small artifact as a row."""
    found = reference(data)
    await app.database.durable.execute(
        "insert into artifacts (sha256, data) values ($1, $2) on conflict do nothing",
        found.sha256,
        data,
    )
    return found


def named_by_checkpoint() -> ArtifactRef:
    """A row that the checkpoint of the last step names: its adapter's config."""
    return ref("{}")
