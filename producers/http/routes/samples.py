"""Samples, with the prompt, answer and reward of each. They are read from the artifacts of their
groups."""

from collections.abc import Iterator, Mapping, Sequence

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.runs import GroupRow
from producers.http.downloads import select_lines
from producers.http.responses import ApiResponse, number, page_of, page_response
from producers.http.routes.runs import find_run_with_history, services
from producers.http.routing import ScopedRoute
from schemas.datasets import DatasetRow
from schemas.errors import NotFound
from schemas.ids import GroupId, sample_id
from schemas.sampling import (
    ArtifactRef,
    Grade,
    Judgement,
    JudgementBatch,
    SampleBatch,
    SampleRecord,
)
from schemas.specs import DatasetRef

GRADES = TypeAdapter(tuple[Grade, ...])
MAX_STEP = 2**31 - 1


async def index(request: Request) -> Response:
    """The training samples of a run, of one step or of all steps."""
    run, _ = await find_run_with_history(request)
    dataset = await services(request).readmodel.runs.dataset_ref(run["id"])
    return await sample_page(request, run["id"], "train", dataset)


async def sample_page(
    request: Request, owner: str, purpose: str, dataset: str | None
) -> ApiResponse:
    """A page of samples. `limit` and `offset` count samples."""
    page = page_of(request)
    step = number(request, "step", default=-1, least=0, most=MAX_STEP)
    groups, total = await services(request).readmodel.runs.groups(
        owner, purpose, page, step=None if step < 0 else step
    )
    rows = await _read_rows(request, dataset, groups)
    samples: list[Mapping[str, object]] = []
    for group in groups:
        ref = ArtifactRef.model_validate_json(group.artifact)
        batch = SampleBatch.model_validate_json(await services(request).artifacts.get(ref))
        judged = await _read_judgements(request, group)
        for position, sample in enumerate(_samples(group, batch, rows, judged), group.first):
            if page.offset <= position < page.offset + page.limit:
                samples.append(sample)
    return page_response("samples", samples, total, page)


async def _read_judgements(request: Request, group: GroupRow) -> tuple[Judgement, ...]:
    if group.judgements is None:
        return ()
    ref = ArtifactRef.model_validate_json(group.judgements)
    data = await services(request).artifacts.get(ref)
    return JudgementBatch.model_validate_json(data).judgements


async def _read_rows(
    request: Request, dataset: str | None, groups: Sequence[GroupRow]
) -> Mapping[int, DatasetRow]:
    if dataset is None:
        raise NotFound("its dataset is unknown")
    content = DatasetRef.model_validate_json(dataset).content
    wanted = {group.dataset_row for group in groups}
    lines = await select_lines(request, content, wanted) if wanted else {}
    return {number: DatasetRow.model_validate_json(line) for number, line in lines.items()}


def _samples(
    group: GroupRow,
    batch: SampleBatch,
    rows: Mapping[int, DatasetRow],
    judged: Sequence[Judgement],
) -> Iterator[Mapping[str, object]]:
    grades = {grade.index: grade for grade in GRADES.validate_json(group.grades)}
    row = rows.get(group.dataset_row, DatasetRow(prompt=()))
    for record in batch.samples:
        sample = _sample(group, record, row, grades.get(record.index))
        scores = [j.model_dump(exclude={"index"}) for j in judged if j.index == record.index]
        yield {**sample, "judgements": scores}


def _sample(
    group: GroupRow, record: SampleRecord, row: DatasetRow, grade: Grade | None
) -> Mapping[str, object]:
    failure = record.failure or (grade.failure if grade else None)
    return {
        "id": sample_id(GroupId(group.group), record.index),
        "group": group.group,
        "step": group.step,
        "slot": group.slot,
        "index": record.index,
        "row": group.dataset_row,
        "prompt": [message.model_dump() for message in row.prompt],
        "messages": [message.model_dump() for message in record.messages],
        "text": record.text,
        "label": row.label,
        "reward": grade.reward if grade else None,
        "parts": grade.parts if grade else {},
        "failure": failure.model_dump(mode="json") if failure else None,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "truncated": record.truncated,
    }


ROUTES = [ScopedRoute("/runs/{ref}/samples", index, scope="read")]
