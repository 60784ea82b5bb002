"""Searches the texts of a run's samples. Each search reads a bounded number of groups and bytes, and
says where the next one goes on."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import TypeAdapter

from infra.readmodel.runs import GroupRow
from infra.spine.ports.artifacts import Artifacts
from schemas.artifact_refs import ArtifactRef
from schemas.ids import GroupId, sample_id
from schemas.sampling import (
    Grade,
    Judgement,
    JudgementBatch,
    Message,
    SampleBatch,
    SampleOutput,
    SampleRecord,
)

GRADES = TypeAdapter(tuple[Grade, ...])

SEARCHED_CHARACTERS = 1 << 20
"""Characters of each text that are searched."""

MOST_GROUPS = 200
MOST_BYTES = 32 << 20
"""Groups, and bytes of their samples, that one search reads. It reads one group at least."""

MOST_HITS = 20
LONGEST_SEARCH = 200
EXCERPT = 80
"""Characters before and after the words of a hit that are shown."""

PLACE = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class SearchPlace:
    """The sample where a search begins. It then reads earlier groups and steps."""

    step: int
    slot: int
    replacement: int
    index: int = 0

    def __str__(self) -> str:
        return f"{self.step}.{self.slot}.{self.replacement}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> "SearchPlace":
        """Return the place of a text. Raises ValueError when it is not one."""
        found = PLACE.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:40]!r} is not a place of a search")
        return cls(*map(int, found.groups()))


NEWEST = SearchPlace(2**31 - 1, 2**31 - 1, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Found:
    """Where words are in a sample: the kind of text, such as `system` or `printed`, and the words with
    what is around them."""

    where: str
    before: str
    words: str
    after: str


@dataclass(frozen=True, slots=True)
class Hit:
    """A sample that has the words."""

    sample: str
    step: int
    slot: int
    replacement: int
    index: int
    reward: float | None
    found: Found


@dataclass(frozen=True, slots=True)
class SearchPage:
    """The hits of one search, the newest first. `newest` and `oldest` are the steps that it read, and
    `following` is where the next search goes on; None after the last sample."""

    hits: tuple[Hit, ...]
    num_samples: int
    num_groups: int
    newest: int | None
    oldest: int | None
    following: SearchPlace | None


class Groups(Protocol):
    """The graded groups of runs."""

    async def groups_before(
        self, owner: str, purpose: str, place: tuple[int, int, int], *, limit: int
    ) -> list[GroupRow]:
        """The groups from a (step, slot, replacement) back to the first one, the last one first."""
        ...


async def search_samples(
    groups: Groups,
    artifacts: Artifacts,
    run: str,
    words: str,
    start: SearchPlace = NEWEST,
    *,
    limit: int = MOST_HITS,
) -> SearchPage:
    """The training samples of a run (its id) whose texts have these words, in small or capital letters,
    from a place on back to the first step, at most `limit` of them."""
    place = (start.step, start.slot, start.replacement)
    rows = await groups.groups_before(run, "train", place, limit=MOST_GROUPS + 1)
    hits: list[Hit] = []
    num_samples = num_groups = num_bytes = 0
    following: SearchPlace | None = None
    for row in rows:
        here = SearchPlace(row.step, row.slot, row.replacement)
        num_bytes += _size(row)
        if num_groups == MOST_GROUPS or (num_groups and num_bytes > MOST_BYTES):
            following = here
            break
        batch, judged = await _read(artifacts, row)
        first = start.index if (row.step, row.slot, row.replacement) == place else 0
        samples = [one for one in batch.samples if one.index >= first]
        num_groups += 1
        left = batch.grader_output
        for number, hit in await asyncio.to_thread(_hits, row, samples, words, judged, left):
            if len(hits) == limit:
                following = SearchPlace(row.step, row.slot, row.replacement, hit.index)
                num_samples += number
                break
            hits.append(hit)
        if following is not None:
            break
        num_samples += len(samples)
    read = rows[:num_groups]
    return SearchPage(
        hits=tuple(hits),
        num_samples=num_samples,
        num_groups=num_groups,
        newest=read[0].step if read else None,
        oldest=read[-1].step if read else None,
        following=following,
    )


def find_text(
    record: SampleRecord,
    words: str,
    judged: Sequence[Judgement] = (),
    *,
    grade: Grade | None = None,
    grader_output: SampleOutput | None = None,
) -> Found | None:
    """The first text of a sample that holds these words, in small or capital letters: of what was said,
    what user code printed and raised, its grader's too, why it failed, and what judges wrote."""
    wanted = words.casefold()
    texts = (*_texts(record, judged), *_texts_of_grader(grade, grader_output))
    for where, text in texts:
        if wanted in text[:SEARCHED_CHARACTERS].casefold():
            return _excerpt(where, text, words)
    return None


def message_texts(message: Message) -> list[str]:
    """The texts of a message: its reasoning, its content and its calls."""
    calls = (f"{call.name} {call.arguments}" for call in message.tool_calls)
    return [text for text in (message.reasoning, message.content, *calls) if text]


def _texts(record: SampleRecord, judged: Sequence[Judgement]) -> Iterator[tuple[str, str]]:
    """The texts of a sample, and what each is."""
    for spoken in record.conversations:
        for message in spoken:
            yield from ((str(message.role), text) for text in message_texts(message))
    yield "answer", record.text
    if record.failure:
        yield "failure", record.failure.message
    if record.output:
        yield "printed", record.output.stdout
        yield "traceback", record.output.traceback or ""
    for one in judged:
        if one.index == record.index:
            yield "judgement", f"{one.explanation} {one.problem or ''}"


def _texts_of_grader(
    grade: Grade | None, grader_output: SampleOutput | None
) -> Iterator[tuple[str, str]]:
    """The texts that the grader of a group left, and what each is."""
    if grade and grade.failure:
        yield "failure", grade.failure.message
    if grader_output:
        yield "printed by the grader", grader_output.stdout
        yield "traceback by the grader", grader_output.traceback or ""


def _excerpt(where: str, text: str, words: str) -> Found:
    """The words with what is around them. What only folded letters have is shown from the beginning."""
    found = re.search(re.escape(words), text, re.IGNORECASE)
    start, end = found.span() if found else (0, 0)
    return Found(
        where=where,
        before=text[max(0, start - EXCERPT) : start],
        words=text[start:end],
        after=text[end : end + EXCERPT],
    )


def _hits(
    row: GroupRow,
    samples: Sequence[SampleRecord],
    words: str,
    judged: Sequence[Judgement],
    grader_output: SampleOutput | None,
) -> list[tuple[int, Hit]]:
    """The samples of a group that have the words, each with its number among `samples`."""
    grades = {grade.index: grade for grade in GRADES.validate_json(row.grades)}
    hits = []
    for number, record in enumerate(samples):
        grade = grades.get(record.index)
        found = find_text(record, words, judged, grade=grade, grader_output=grader_output)
        if found:
            hits.append((number, _hit(row, record, grade, found)))
    return hits


def _hit(row: GroupRow, record: SampleRecord, grade: Grade | None, found: Found) -> Hit:
    return Hit(
        sample=sample_id(GroupId(row.group), record.index),
        step=row.step,
        slot=row.slot,
        replacement=row.replacement,
        index=record.index,
        reward=grade.reward if grade else None,
        found=found,
    )


def _refs(row: GroupRow) -> tuple[ArtifactRef, ArtifactRef | None]:
    samples = ArtifactRef.model_validate_json(row.artifact)
    judged = ArtifactRef.model_validate_json(row.judgements) if row.judgements else None
    return samples, judged


def _size(row: GroupRow) -> int:
    return sum(ref.size for ref in _refs(row) if ref)


async def _read(artifacts: Artifacts, row: GroupRow) -> tuple[SampleBatch, tuple[Judgement, ...]]:
    samples, judged = _refs(row)
    content = await artifacts.get_artifact(samples, cached=False)
    batch = await asyncio.to_thread(SampleBatch.model_validate_json, content)
    if judged is None:
        return batch, ()
    found = await artifacts.get_artifact(judged, cached=False)
    return batch, JudgementBatch.model_validate_json(found).judgements
