"""A run's user code gets its secrets, and a missing one fails the sample or the grade by its name."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from consumers import grade
from consumers.rollout.consumer import perform
from consumers.user_code.user_secrets import sandbox_owner
from infra.identity.secrets.memory import MemorySecrets
from infra.ports.secrets import SecretOwner
from infra.ports.services import WorkflowResult
from schemas.datasets import DatasetRow
from schemas.effects import GenerateSample, GradeGroup, SampleFinished
from schemas.errors import UserCodeError
from schemas.ids import GroupKey, Purpose
from schemas.sampling import Message
from schemas.secrets.secret_value import SecretValue
from schemas.specs import GroupSpec, RolloutRef
from tests.kit.fakes import (
    Bench,
    FakeGateway,
    FakeSampler,
    FakeSession,
    FakeUserCode,
    bench,
    turn,
)
from tests.kit.specs import group_spec, template

VALUE = "hush-hush-1"
ROW = DatasetRow(prompt=(Message(role="user", content="x"),), label="1", metadata={})


def workflow(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
    session.ask(prompt, "three")
    return WorkflowResult(messages=None)


async def requiring(world: Bench, **rollout: object) -> GroupSpec:
    """A group of one sample whose user code requires KEY."""
    made = template(workflow="Say", num_samples=1, dataset=await world.dataset(ROW))
    assert made.rollout is not None
    wanted = {"secrets": ("KEY",), "workspace": "w", "submitter": "ann", **rollout}
    code = made.rollout.model_copy(update=wanted)
    return group_spec(made.model_copy(update={"rollout": code}), row=0)


def world_of(directory: Path, secrets: MemorySecrets) -> Bench:
    gateway = FakeGateway()
    made = bench(
        directory,
        sampler=FakeSampler(lambda request: turn("x")),
        gateway=gateway,
        user=FakeUserCode(gateway=gateway, workflow=workflow),
    )
    return replace(made, ports=replace(made.ports, secrets=secrets))


def code_of(spec: GroupSpec) -> RolloutRef:
    assert spec.template.rollout is not None
    return spec.template.rollout


@pytest.mark.parametrize(
    ("owner", "rollout", "is_found"),
    [
        (SecretOwner("workspace", "w"), {}, True),
        (SecretOwner("personal", "ann"), {}, True),
        (SecretOwner("workspace", "w"), {"pushed": True}, True),
        (SecretOwner("personal", "ann"), {"pushed": True}, False),
        (SecretOwner("personal", "bob"), {}, False),
        (SecretOwner("workspace", "other"), {}, False),
    ],
)
async def test_secrets_reach_only_their_workspace_or_person(
    tmp_path: Path, owner: SecretOwner, rollout: dict[str, object], is_found: bool
) -> None:
    secrets = MemorySecrets()
    await secrets.put_secret(owner, "KEY", SecretValue(VALUE), by="ann")
    world = world_of(tmp_path, secrets)
    spec = await requiring(world, **rollout)
    if is_found:
        found = await sandbox_owner(spec, code_of(spec), world.ports.secrets)
        assert {name: value.reveal() for name, value in found.secrets.items()} == {"KEY": VALUE}
        assert found.run == spec.owner
        return
    with pytest.raises(UserCodeError, match="secret KEY is not set; set it with: headrace secret"):
        await sandbox_owner(spec, code_of(spec), world.ports.secrets)


@pytest.mark.parametrize(
    ("owner", "is_found"),
    [
        ("r1", True),
        ("r1v12", True),
        ("r2", False),
        ("r2v12", False),
        ("r1v", False),
        ("vr1", False),
    ],
)
async def test_a_secret_of_one_run_reaches_it_and_its_validations(
    tmp_path: Path, owner: str, is_found: bool
) -> None:
    secrets = MemorySecrets()
    await secrets.give("r1", {"KEY": SecretValue(VALUE)})
    world = world_of(tmp_path, secrets)
    spec = await requiring(world)
    spec = spec.model_copy(update={"group": str(GroupKey(owner, Purpose.TRAIN, 1, 0))})
    if is_found:
        found = await sandbox_owner(spec, code_of(spec), secrets)
        assert found.secrets["KEY"].reveal() == VALUE
        return
    with pytest.raises(UserCodeError, match="secret KEY is not set"):
        await sandbox_owner(spec, code_of(spec), secrets)


async def test_a_missing_secret_fails_the_sample_and_says_its_name(tmp_path: Path) -> None:
    world = world_of(tmp_path, MemorySecrets())
    spec = await requiring(world)
    outcome = await perform(GenerateSample(spec=spec, index=0), world.ports)
    assert isinstance(outcome, SampleFinished)
    assert outcome.entry.failure == "validation_error"
    assert "secret KEY is not set" in (outcome.entry.message or "")
    effect = GradeGroup(spec=spec, parts=(outcome.artifact,), entries=(outcome.entry,))
    graded = await grade.perform(effect, world.ports)
    assert graded.grades[0].reward is None


async def test_a_grader_that_lacks_a_secret_grades_nothing(tmp_path: Path) -> None:
    secrets = MemorySecrets()
    owner = SecretOwner("personal", "ann")
    await secrets.put_secret(owner, "KEY", SecretValue(VALUE), by="ann")
    world = world_of(tmp_path, secrets)
    spec = await requiring(world)
    outcome = await perform(GenerateSample(spec=spec, index=0), world.ports)
    assert isinstance(outcome, SampleFinished)
    assert outcome.entry.failure is None
    await secrets.delete(owner, "KEY")
    effect = GradeGroup(spec=spec, parts=(outcome.artifact,), entries=(outcome.entry,))
    [grade_] = (await grade.perform(effect, world.ports)).grades
    assert grade_.failure is not None
    assert "secret KEY is not set" in grade_.failure.message


async def test_a_regrade_gets_no_secret_that_was_given_for_the_run_alone(tmp_path: Path) -> None:
    secrets = MemorySecrets()
    world = world_of(tmp_path, secrets)
    spec = await requiring(world)
    await secrets.give(spec.owner, {"KEY": SecretValue(VALUE)})
    assert (await sandbox_owner(spec, code_of(spec), world.ports.secrets)).secrets
    with pytest.raises(UserCodeError, match="secret KEY is not set"):
        await sandbox_owner(spec, code_of(spec), world.ports.secrets, owner="g1")
