"""What a teacher on a server says about samples is recorded with their grades, once."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from consumers.grade import perform
from consumers.judging.teacher_logprobs import ask_teacher
from infra.identity.secrets.memory import MemorySecrets
from infra.model_api.providers.client import ProviderClient
from infra.model_api.providers.teachers import VllmTeachers
from infra.ports.secrets import SecretOwner
from infra.spine.runtime.places import perform_with
from schemas.datasets import DatasetRow
from schemas.effects import GradeGroup
from schemas.errors import FailureCategory, Refused, TeacherAway, TransientError, UserCodeError
from schemas.models.constraints import AppliedGrammar, ConstrainedSpan
from schemas.sampling import Grade, ProviderRef, SampleBatch, SampleFailure, SampleRecord
from schemas.secrets.secret_value import SecretValue
from tests.kit.fakes import Bench, FakeUserCode, bench
from tests.kit.provider import FakeProvider, provider
from tests.kit.specs import entry, group_spec, template
from tests.kit.teacher import MODEL, FakeTeacher, distribution, row_of

FIRST, SECOND = row_of((9, 12, 15, 18), prompt=2), row_of((9, 12, 20), prompt=2)
SILENT = row_of((9, 12), prompt=2)
FAILURE = SampleFailure(category=FailureCategory.TIMEOUT, message="late")
RECORDS = (
    SampleRecord(index=0, sequences=(FIRST, SILENT, SECOND)),
    SampleRecord(index=1, sequences=(SECOND,)),
    SampleRecord(index=2, sequences=(FIRST,), failure=FAILURE),
)


class Lesson:
    """A group that is graded again and again, and the teacher of its run."""

    def __init__(
        self, directory: Path, fake: FakeProvider, teacher: FakeTeacher, *, patience_s: float
    ) -> None:
        self.teacher, self.fake, self.secrets = teacher, fake, MemorySecrets()
        self.user = FakeUserCode(
            grader=lambda _, s: tuple(Grade(index=r.index, reward=1.0) for r in s)
        )
        self.client = ProviderClient(None, first_pause_s=0.001)
        made = bench(directory, user=self.user)
        self.teachers = VllmTeachers(self.client, patience_s=patience_s)
        ports = replace(made.ports, teachers=self.teachers, secrets=self.secrets)
        self.bench = Bench(ports, made.world, made.blobs, made.clock)

    async def grade(
        self,
        records: tuple[SampleRecord, ...] = RECORDS,
        *,
        secret: str | None = None,
        **rollout: Any,
    ) -> SampleBatch:
        """The content of the artifact of the graded group."""
        row = DatasetRow(prompt=(), label="3")
        of = template(dataset=await self.bench.dataset(row), num_samples=len(records))
        assert of.rollout is not None
        ref = ProviderRef(name=MODEL, model=MODEL, base_url=self.fake.base_url, secret=secret)
        own = of.rollout.model_copy(update=rollout)
        spec = group_spec(of.model_copy(update={"rollout": own, "teacher_server": ref}), row=0)
        data = SampleBatch(group=spec.group, samples=records).model_dump_json().encode()
        part = await self.bench.ports.artifacts.put_artifact(data, run="r1")
        entries = tuple(entry(record.index) for record in records)
        effect = GradeGroup(spec=spec, parts=(part,), entries=entries)
        outcome = await perform(effect, self.bench.ports)
        found = await self.bench.ports.artifacts.get_artifact(outcome.group_artifact)
        return SampleBatch.model_validate_json(found)


@asynccontextmanager
async def lesson(
    directory: Path, *, patience_s: float = 60, **faults: Any
) -> AsyncIterator[Lesson]:
    teacher = FakeTeacher(**faults)
    async with provider(teacher) as fake:
        one = Lesson(directory, fake, teacher, patience_s=patience_s)
        try:
            yield one
        finally:
            await one.client.aclose()


async def test_each_learned_row_is_recorded_with_the_teacher_s_logprobs(tmp_path: Path) -> None:
    async with lesson(tmp_path) as one:
        batch = await one.grade()
    texts = one.teacher.texts

    def said(*tokens: int) -> tuple[float, ...]:
        pairs = pairwise(tokens[1:])
        return (0.0, 0.0, *(distribution(before, texts)[token] for before, token in pairs))

    first, second, failed = batch.samples
    assert [row.teacher_logprobs for row in first.sequences] == [
        said(9, 12, 15, 18),
        (),
        said(9, 12, 20),
    ]
    assert [row.teacher_logprobs for row in second.sequences] == [said(9, 12, 20)]
    assert failed == RECORDS[2]
    assert batch.teacher_tokens == {token: texts[token] for token in (12, 15, 18, 20)}
    assert sorted(one.teacher.asked) == sorted([FIRST.tokens, SECOND.tokens, SECOND.tokens])


async def test_a_group_without_a_server_keeps_its_artifact_as_it_was(tmp_path: Path) -> None:
    """No existing log gets another byte."""
    made = bench(tmp_path, user=FakeUserCode(grader=lambda _, s: ()))
    of = template(dataset=await made.dataset(DatasetRow(prompt=(), label="3")), num_samples=3)
    spec = group_spec(of, row=0)
    assert "teacher_" not in spec.model_dump_json()
    data = SampleBatch(group=spec.group, samples=RECORDS).model_dump_json().encode()
    assert b"teacher_" not in data
    part = await made.ports.artifacts.put_artifact(data, run="r1")
    effect = GradeGroup(spec=spec, parts=(part,), entries=(entry(0), entry(1), entry(2)))
    assert (await perform(effect, made.ports)).group_artifact == part


async def test_no_grader_runs_while_the_teacher_is_away(tmp_path: Path) -> None:
    async with lesson(tmp_path, patience_s=0.5, fault="down") as one:
        for _ in range(2):
            with pytest.raises(TeacherAway, match=r"row . of sample . of group r1-train-1-0-0"):
                await one.grade()
        assert one.user.num_gradings == 0
        one.teacher.fault, one.teachers._patience_s = None, 60
        assert (await one.grade()).teacher_tokens
        assert one.user.num_gradings == 1


async def test_an_unusable_answer_names_sample_row_and_token(tmp_path: Path) -> None:
    async with lesson(tmp_path, fault="nan", fault_from=2) as one:
        with pytest.raises(
            TransientError,
            match=r"about row 0 of sample 0 of group r1-train-1-0-0 \(row 0 of the dataset\): it gives "
            "token 15 in place 2 the log-probability nan",
        ):
            await one.grade(RECORDS[:1])


async def test_a_forced_answer_is_refused_by_its_sample(tmp_path: Path) -> None:
    grammar = AppliedGrammar.model_construct()
    span = ConstrainedSpan.model_construct(start=2, end=3, grammar=grammar)
    forced = SECOND.model_copy(update={"constrained": (span,)})
    async with lesson(tmp_path) as one:
        spec = group_spec(template())
        ref = ProviderRef(name=MODEL, model=MODEL, base_url=one.fake.base_url)
        spec = spec.model_copy(
            update={"template": spec.template.model_copy(update={"teacher_server": ref})}
        )
        with pytest.raises(
            Refused, match=r"likely forced answers are, and row 0 of sample 1 .*; ask"
        ):
            await ask_teacher(
                spec,
                (SampleRecord(index=1, sequences=(forced,)),),
                teachers=one.bench.ports.teachers,
                secrets=one.secrets,
            )
        assert not one.teacher.asked


KEY = SecretValue("sk-of-the-teacher-1234")


async def test_the_key_is_that_of_the_workspace_or_the_submitter(tmp_path: Path) -> None:
    async with lesson(tmp_path) as one:
        given: dict[str, Any] = {"secret": "TEACHER_KEY", "workspace": "w1", "submitter": "ann"}
        with pytest.raises(UserCodeError, match="headrace secret set TEACHER_KEY"):
            await one.grade(**given)
        personal = SecretOwner("personal", "ann")
        await one.secrets.put_secret(personal, "TEACHER_KEY", KEY, by="ann")
        await one.grade(**given)
        assert set(one.fake.keys) == {f"Bearer {KEY.reveal()}"}
        with pytest.raises(UserCodeError, match="--scope workspace"):
            await one.grade(**given, pushed=True)
        with pytest.raises(UserCodeError, match="headrace secret set TEACHER_KEY"):
            await one.grade(**{**given, "submitter": "bob"})


async def test_a_group_takes_no_place_while_its_teacher_reads(tmp_path: Path) -> None:
    held: list[int] = []

    @contextmanager
    def give_back() -> Iterator[None]:
        held.append(len(one.teacher.asked))
        yield
        held.append(len(one.teacher.asked))

    async with lesson(tmp_path) as one:
        perform_with(give_back)
        await one.grade()
    assert held == [0, 3]
