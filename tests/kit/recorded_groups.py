"""Recorded groups for tests of the datasets that are made of them."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from producers.core.datasets.recorded_rows import RecordedGroup
from schemas.errors import FailureCategory
from schemas.events import Event, GroupGraded, GroupsRequested, RunRequested, StepSettled
from schemas.ids import REFUTED, GroupKey, Purpose
from schemas.sampling import (
    Grade,
    Message,
    SampleBatch,
    SampleFailure,
    SampleOutput,
    SampleRecord,
)
from schemas.sampling import Sequence as Tokens
from schemas.specs import GroupSpec, SampleEntry, Slot
from tests.kit.application import Application
from tests.kit.history import keep
from tests.kit.specs import template, version
from tests.kit.story import beginning

SECRET_LABEL = "the label is 42"

Answer = tuple[str, float | None]
"""The text of a sample and its reward."""


def record(
    index: int, text: str, *, question: str = "Say 3", is_failed: bool = False, **changes: Any
) -> SampleRecord:
    """A sample that answers a question in two tokens. Its user code printed the label."""
    tokens = Tokens(
        tokens=(5, 6, 7, 8 + index),
        loss_mask=(0, 0, 1, 1),
        logprobs=(0.0, 0.0, -0.5, -0.25 - index),
    )
    failure = SampleFailure(category=FailureCategory.TIMEOUT, message=SECRET_LABEL)
    return SampleRecord.model_validate(
        {
            "index": index,
            "messages": (
                Message(role="user", content=question),
                Message(role="assistant", content=text),
            ),
            "text": text,
            "sequences": (tokens,),
            "num_turns": 1,
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "output": SampleOutput(stdout=SECRET_LABEL),
            "failure": failure if is_failed else None,
            **changes,
        }
    )


def recorded_group(
    answers: Sequence[Answer], *, group: str = "r1-train-1-0-0", question: str = "Say 3"
) -> RecordedGroup:
    """A group with these answers. One without a reward failed."""
    samples = tuple(
        record(index, text, question=question, is_failed=reward is None)
        for index, (text, reward) in enumerate(answers)
    )
    grades = tuple(Grade(index=n, reward=reward) for n, (_, reward) in enumerate(answers))
    return RecordedGroup(group, 0, SampleBatch(group=group, samples=samples), grades)


async def record_run(
    app: Application,
    steps: Sequence[Sequence[RecordedGroup]],
    *,
    name: str = "first",
    run: str = "r1",
    workspace: str | None = None,
    refuted: Sequence[int] = (),
) -> None:
    """A run, not over, whose settled steps have these groups, one list for each step. In step 1, the
    groups of the slots `refuted` were generated again with the same answers."""
    events: list[Event] = []
    for event in beginning(run, name, steps=len(steps) + 1):
        if isinstance(event, RunRequested) and workspace is not None:
            event = event.model_copy(update={"workspace": workspace})
        events.append(event)
    of = template().model_copy(update={"run": run})
    for number, groups in enumerate(steps, start=1):
        slots = tuple(Slot(slot=slot, row=slot) for slot in range(len(groups)))
        events.append(
            GroupsRequested(owner=run, purpose=Purpose.TRAIN, step=number, slots=slots, template=of)
        )
        places = [(slot, group, 0) for slot, group in enumerate(groups)]
        if number == 1 and refuted:
            again = tuple(Slot(slot=slot, replacement=REFUTED, row=slot) for slot in refuted)
            events.append(
                GroupsRequested(
                    owner=run, purpose=Purpose.TRAIN, step=number, slots=again, template=of
                )
            )
            places += [(slot, groups[slot], REFUTED) for slot in refuted]
        for slot, group, replacement in places:
            key = str(GroupKey(run, Purpose.TRAIN, number, slot, replacement))
            batch = group.batch.model_copy(update={"group": key})
            artifact = await keep(app, batch.model_dump_json().encode())
            entries = tuple(SampleEntry(index=one.index) for one in batch.samples)
            spec = GroupSpec(group=key, row=slot, template=of)
            events.append(
                GroupGraded(spec=spec, artifact=artifact, entries=entries, grades=group.grades)
            )
        events.append(StepSettled(run=run, step=number, state=version(number), metrics={}))
    await app.services.readmodel.names.take("run", name, run, scope=workspace or "w")
    for event in events:
        [recorded] = await app.services.log.append([event], cause=uuid4())
    assert await app.services.readmodel.caught_up(recorded.cursor, timeout_s=60)
