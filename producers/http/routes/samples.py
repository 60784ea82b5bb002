"""Samples, with the prompt, answer and reward of each. They are read from the artifacts of their
groups."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.registry import EvaluationGroup
from infra.readmodel.runs import GroupRow, PageRange
from producers.core.history.sample_search import (
    GRADES,
    LONGEST_SEARCH,
    MOST_BYTES,
    MOST_GROUPS,
    MOST_HITS,
    NEWEST,
    SearchPage,
    SearchPlace,
    search_samples,
)
from producers.core.history.trace import trace
from producers.http.downloads import download, select_lines
from producers.http.responses import ApiResponse, number, page_of, page_response
from producers.http.routes.runs import find_run_with_history, services
from producers.http.routing import ScopedRoute
from schemas.artifact_refs import ArtifactRef
from schemas.datasets import DatasetRow
from schemas.errors import InvalidConfig, Issue, NotFound
from schemas.ids import GroupId, GroupKey, parse_sample_id, sample_id
from schemas.learner import numbered_turns
from schemas.models.openai_messages import openai_message
from schemas.sampling import (
    Grade,
    Judgement,
    JudgementBatch,
    SampleBatch,
    SampleOutput,
    SampleRecord,
)
from schemas.specs import DatasetRef

MAX_STEP = 2**31 - 1
LONGEST_NAME = 200


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
    rows = await read_rows(request, dataset, groups)
    samples: list[Mapping[str, object]] = []
    for group in groups:
        batch = await read_batch(request, group)
        judged = await read_judgements(request, group)
        for position, sample in enumerate(_samples(group, batch, rows, judged), group.first):
            if page.offset <= position < page.offset + page.limit:
                samples.append(sample)
    return page_response("samples", samples, total, page)


async def search(request: Request) -> Response:
    """The training samples of a run that have the words `text`, the newest first. A request searches a
    bounded part of the run, and `next_place` is the `place` that goes on from there."""
    run, _ = await find_run_with_history(request)
    words = request.query_params.get("text", "")
    if not words.strip():
        message = "is missing; write the words to search for"
        raise InvalidConfig(f"text {message}", issues=(Issue("text", message),))
    return ApiResponse(search_json(await search_page(request, run["id"], words)))


async def search_page(request: Request, run: str, words: str) -> SearchPage:
    """At most `limit` samples of a search, from the request's `place` on. Raises InvalidConfig."""
    if len(words) > LONGEST_SEARCH:
        message = f"has {len(words)} characters; search for at most {LONGEST_SEARCH}"
        raise InvalidConfig(f"text {message}", issues=(Issue("text", message),))
    asked = request.query_params.get("place")
    try:
        place = SearchPlace.parse(asked) if asked else NEWEST
    except ValueError as error:
        message = f"must be a place that a search gave, got {asked!r:.40}; remove it"
        raise InvalidConfig(f"place {message}", issues=(Issue("place", message),)) from error
    limit = number(request, "limit", default=MOST_HITS, least=1, most=MOST_HITS)
    core = services(request)
    return await search_samples(core.readmodel.runs, core.artifacts, run, words, place, limit=limit)


def search_json(page: SearchPage) -> Mapping[str, object]:
    """The page of a search as JSON."""
    return {
        "samples": [asdict(hit) for hit in page.hits],
        "searched": {
            "samples": page.num_samples,
            "groups": page.num_groups,
            "newest_step": page.newest,
            "oldest_step": page.oldest,
            "most_groups": MOST_GROUPS,
            "most_bytes": MOST_BYTES,
        },
        "next_place": str(page.following) if page.following else None,
    }


async def read_batch(request: Request, group: GroupRow | EvaluationGroup) -> SampleBatch:
    """The samples of a group."""
    ref = ArtifactRef.model_validate_json(group.artifact)
    return SampleBatch.model_validate_json(await services(request).artifacts.get_artifact(ref))


async def read_judgements(
    request: Request, group: GroupRow | EvaluationGroup
) -> tuple[Judgement, ...]:
    """The judgements of rubrics about a group's samples."""
    if group.judgements is None:
        return ()
    ref = ArtifactRef.model_validate_json(group.judgements)
    data = await services(request).artifacts.get_artifact(ref)
    return JudgementBatch.model_validate_json(data).judgements


async def read_rows(
    request: Request, dataset: str | None, groups: Sequence[GroupRow | EvaluationGroup]
) -> Mapping[int, DatasetRow]:
    """The dataset rows of these groups, by number."""
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
        sample = sample_json(group, record, row, grades.get(record.index))
        yield {**sample, "judgements": judgements_json(judged, record.index)}


def judgements_json(judged: Sequence[Judgement], index: int) -> list[Mapping[str, object]]:
    """The judgements of the sample `index`, as JSON."""
    return [one.model_dump(exclude={"index"}) for one in judged if one.index == index]


def sample_json(
    group: GroupRow | EvaluationGroup, record: SampleRecord, row: DatasetRow, grade: Grade | None
) -> Mapping[str, object]:
    """A sample as JSON, with the prompt and the label of its row."""
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
        "branches": [[message.model_dump() for message in one] for one in record.branches],
        "text": record.text,
        "label": row.label,
        "reward": grade.reward if grade else None,
        "parts": grade.parts if grade else {},
        "rewarded_turns": rewarded_turns(record),
        "agent_rewards": record.agent_rewards,
        "failure": failure.model_dump(mode="json") if failure else None,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "truncated": record.truncated,
    }


def rewarded_turns(record: SampleRecord) -> list[Mapping[str, object]]:
    """The turns of a sample that its workflow gave a reward or an agent, with their numbers."""
    return [
        {"turn": number, "agent": turn.agent, "reward": turn.reward}
        for number, turn in numbered_turns(record).items()
        if turn.agent is not None or turn.reward is not None
    ]


async def show(request: Request) -> Response:
    """One training sample of a run, turn by turn, with what its user code left behind."""
    run, _ = await find_run_with_history(request)
    dataset = await services(request).readmodel.runs.dataset_ref(run["id"])
    return await sample_detail(request, run["id"], dataset)


async def file(request: Request) -> Response:
    """A file that a sample's workflow left behind."""
    run, _ = await find_run_with_history(request)
    return await sample_file(request, run["id"])


async def sample_detail(request: Request, owner: str, dataset: str | None) -> ApiResponse:
    """The sample that the path names: its messages as OpenAI writes them, its tools, its reward, and the
    output of its workflow and of its group's grader. Raises NotFound when `owner` has no such graded
    sample."""
    group, batch, record = await find_sample(request, owner)
    rows = await read_rows(request, dataset, [group])
    judged = await read_judgements(request, group)
    alone = batch.model_copy(update={"samples": (record,)})
    (sample,) = _samples(group, alone, rows, judged)
    row = rows.get(group.dataset_row, DatasetRow(prompt=()))
    detail = {
        **sample,
        "prompt": [openai_message(message) for message in row.prompt],
        "messages": [openai_message(message) for message in record.messages],
        "branches": [[openai_message(message) for message in one] for one in record.branches],
        "tools": [tool.model_dump() for tool in record.tools],
        "num_turns": record.num_turns,
        "output": _output(record.output),
        "grader_output": _output(batch.grader_output),
    }
    return ApiResponse({"sample": detail})


async def sample_file(request: Request, owner: str) -> Response:
    """The file that the path names, of the sample that it names. Raises NotFound."""
    _, _, record = await find_sample(request, owner)
    name = request.path_params["name"]
    files = record.output.files if record.output else {}
    if name not in files:
        raise NotFound(
            f"the sample has no file {name[:LONGEST_NAME]!r}; it has: {', '.join(files) or 'none'}"
        )
    return await download(request, files[name], name)


def _output(output: SampleOutput | None) -> Mapping[str, object] | None:
    if output is None:
        return None
    files = {name: ref.size for name, ref in output.files.items()}
    return {**output.model_dump(exclude={"files"}), "files": files}


async def find_sample(request: Request, owner: str) -> tuple[GroupRow, SampleBatch, SampleRecord]:
    """The sample that the path names, with its group. Raises NotFound when `owner` has no such
    sample."""
    name = request.path_params["sample"]
    absent = NotFound(
        f"there is no graded sample {name[:LONGEST_NAME]!r} here; the list of samples shows the ids"
    )
    try:
        group_id, index = parse_sample_id(name)
        key = GroupKey.parse(group_id)
    except ValueError:
        raise absent from None
    if key.owner != owner or not 0 <= key.step <= MAX_STEP:
        raise absent
    everything = PageRange(limit=MAX_STEP)
    groups, _ = await services(request).readmodel.runs.groups(
        owner, str(key.purpose), everything, step=key.step
    )
    for group in groups:
        if group.group == group_id:
            batch = await read_batch(request, group)
            for record in batch.samples:
                if record.index == index:
                    return group, batch, record
    raise absent


async def hops(request: Request) -> Response:
    """The eight hops of the sample `sample` of a run."""
    sample = request.query_params.get("sample")
    if not sample:
        raise InvalidConfig(
            "sample is missing from the query; give it, like ?sample=ID",
            issues=(Issue("sample", "is missing from the query; give it, like ?sample=ID"),),
        )
    run = await services(request).lookup.whole_run(request.path_params["ref"])
    found = await trace(services(request).log, run, sample)
    shown = [hop.to_json() for hop in found.hops]
    return ApiResponse({"sample": sample, "hops": shown, "reason": found.reason})


ROUTES = [
    ScopedRoute("/runs/{ref}/trace", hops, scope="read"),
    ScopedRoute("/runs/{ref}/samples", index, scope="read"),
    ScopedRoute("/runs/{ref}/search", search, scope="read"),
    ScopedRoute("/runs/{ref}/samples/{sample}", show, scope="read"),
    ScopedRoute("/runs/{ref}/samples/{sample}/files/{name:path}", file, scope="read"),
]
