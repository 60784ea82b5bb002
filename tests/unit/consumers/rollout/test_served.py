"""Samples of a rollout server: it makes them and grades them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from consumers.grade import perform as perform_grading
from consumers.rollout.consumer import CONSUMER, perform
from infra.ports.services import WorkflowResult
from schemas.datasets import DatasetRow
from schemas.effects import GenerateSample, GradeGroup, SampleFinished
from schemas.errors import FailureCategory, UserCodeError
from schemas.events import GroupsRequested
from schemas.ids import Purpose
from schemas.sampling import Grade, Message, SampleBatch, SampleFailure, SampleRecord
from schemas.specs import GroupTemplate
from tests.kit.decider import given
from tests.kit.fakes import FakeGateway, FakeSampler, FakeSession, FakeUserCode, bench, turn
from tests.kit.specs import entry, group_spec, slots, template

ROW = DatasetRow(prompt=(Message(role="user", content="1 + 2"),), label="three", metadata={"a": 1})
FAILED = SampleFailure(category=FailureCategory.VALIDATION, message="it returned no reward")


def served(of: GroupTemplate) -> GroupTemplate:
    """The template with a rollout server."""
    assert of.rollout is not None
    rollout = of.rollout.model_copy(update={"kind": "server", "workflow": None, "grader": None})
    return of.model_copy(update={"rollout": rollout})


def test_a_group_of_a_server_is_an_effect_per_sample() -> None:
    spec = group_spec(served(template()))
    requested = GroupsRequested(
        owner="r1", purpose=Purpose.TRAIN, step=1, slots=slots(3), template=spec.template
    )
    effects = [GenerateSample(spec=spec, index=i) for i in range(spec.template.num_samples)]
    given(CONSUMER).when(requested).then(effects=effects)


def say(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
    session.ask(prompt, "three")
    return WorkflowResult(messages=None)


async def make(directory: Path, grade: Grade | UserCodeError) -> tuple[SampleRecord, list[object]]:
    """The record of one sample that the server graded so, and what the server received."""

    def grader(label: str | None, samples: Sequence[SampleRecord]) -> tuple[Grade, ...]:
        if isinstance(grade, UserCodeError):
            raise grade
        return (grade,)

    gateway = FakeGateway()
    user = FakeUserCode(gateway=gateway, workflow=say, grader=grader)
    sampler = FakeSampler(lambda request: turn("unheard"))
    world = bench(directory, sampler=sampler, gateway=gateway, user=user)
    spec = group_spec(served(template(num_samples=4, dataset=await world.dataset(ROW))), row=0)
    outcome = await perform(GenerateSample(spec=spec, index=2), world.ports)
    assert isinstance(outcome, SampleFinished)
    assert outcome.artifact is not None
    batch = SampleBatch.model_validate_json(
        await world.ports.artifacts.get_artifact(outcome.artifact)
    )
    return batch.samples[0], user.seen_by_workflow


async def test_a_server_gets_the_label_and_its_grade_is_recorded(tmp_path: Path) -> None:
    record, seen = await make(tmp_path, Grade(index=0, reward=0.5))
    assert record.grade == Grade(index=2, reward=0.5)
    assert record.messages == (*ROW.prompt, Message(role="assistant", content="three"))
    assert "'three'" in repr(seen)


async def test_a_server_that_fails_an_attempt_fails_its_sample(tmp_path: Path) -> None:
    record, _ = await make(tmp_path, UserCodeError(FailureCategory.AGENT, "it raised"))
    assert record.failure == SampleFailure(category=FailureCategory.AGENT, message="it raised")
    assert record.grade is None
    assert record.sequences == ()


@pytest.mark.parametrize(
    ("grade", "expected"),
    [
        (Grade(index=0, reward=0.5), Grade(index=0, reward=0.5)),
        (
            Grade(index=0, reward=None, failure=FAILED),
            Grade(index=0, reward=None, failure=FAILED),
        ),
    ],
)
async def test_the_recorded_grade_is_used(tmp_path: Path, grade: Grade, expected: Grade) -> None:
    user = FakeUserCode()
    world = bench(tmp_path, user=user)
    spec = group_spec(served(template(dataset=await world.dataset(ROW))), row=0)
    batch = SampleBatch(group=spec.group, samples=(SampleRecord(index=0, text="x", grade=grade),))
    part = await world.ports.artifacts.put_artifact(batch.model_dump_json().encode(), run="r1")
    effect = GradeGroup(spec=spec, parts=(part,), entries=(entry(0),))
    assert (await perform_grading(effect, world.ports)).grades == (expected,)
    assert user.num_gradings == 0
