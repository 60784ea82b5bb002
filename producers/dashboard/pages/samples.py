"""The samples of a run: the groups of a step, and the answers of one group side by side."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import cast

from pydantic_core import to_jsonable_python
from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.runs import GroupRow, PageRange
from producers.core.history.sample_search import (
    GRADES,
    LONGEST_SEARCH,
    MOST_BYTES,
    MOST_GROUPS,
    find_text,
)
from producers.core.models.vocabularies import Vocabulary
from producers.dashboard.answers import (
    ORDERS,
    answer,
    share_of_text,
    text_part,
    tokens,
    whole_text,
)
from producers.dashboard.branches import num_given, parse_choice
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.dashboard.token_spans import COLOURS, legend, num_stretches
from producers.http.responses import ApiResponse, number
from producers.http.routes.runs import find_run_with_history, services
from producers.http.routes.samples import (
    MAX_STEP,
    find_sample,
    read_batch,
    read_judgements,
    read_rows,
    sample_file,
    search,
    search_page,
)
from schemas.datasets import DatasetRow
from schemas.errors import InvalidConfig, Issue, NotFound, TransientError
from schemas.events import EvaluationRequested
from schemas.ids import REFUTED, GroupKey
from schemas.sampling import Message, ModelRef, SampleBatch

EVERYTHING = PageRange(limit=MAX_STEP)
ANSWERS_PER_PAGE = 8
GROUPS_IN_LIST = 200
LAST = "last"
SLOT = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


async def index(request: Request) -> Response:
    values = await _values(request, is_cut=True)
    return html(request, "samples.html", values)


async def data(request: Request) -> Response:
    """The same group as JSON."""
    return group_json(await _values(request, is_cut=False))


def group_json(values: Mapping[str, object]) -> Response:
    """A group and its answers as JSON, from what its page says."""
    chosen = values["chosen"]
    left_out = {
        "run",
        "source",
        "orders",
        "colours",
        "legend",
        "row",
        "chosen",
        "most",
        "listed",
        "slot",
    }
    shown = {key: value for key, value in values.items() if key not in left_out}
    group = asdict(chosen)["group"] if isinstance(chosen, GroupRow) else None
    content = to_jsonable_python({**shown, "group": group}, inf_nan_mode="null")
    return ApiResponse(content)


async def text(request: Request) -> Response:
    """Everything that was said in one sample, as a text to download, or the one text that `part`
    names."""
    run, _ = await find_run_with_history(request)
    return await sample_text(request, run["id"])


async def sample_text(request: Request, owner: str) -> Response:
    """The text, or a part of it, of a sample of a run or an evaluation (its id)."""
    _, _, record = await find_sample(request, owner)
    part = request.query_params.get("part")
    content = whole_text(record) if part is None else text_part(record, part)
    if content is None:
        raise NotFound(
            f"the sample has no text {part[:LONGEST_SEARCH] if part else ''!r}; "
            "leave `part` out to read all of it"
        )
    return Response(
        content.encode("utf-8", "replace"),
        media_type="text/plain",
        headers={"Content-Disposition": 'attachment; filename="sample.txt"'},
    )


async def file(request: Request) -> Response:
    """A file that the workflow of a sample left behind, to download."""
    run, _ = await find_run_with_history(request)
    return await sample_file(request, run["id"])


async def _values(request: Request, *, is_cut: bool) -> Mapping[str, object]:
    run, _ = await find_run_with_history(request)
    runs = services(request).readmodel.runs
    last = await runs.newest_graded_step(run["id"], "train") or 1
    step = number(request, "step", default=last, least=0, most=MAX_STEP)
    groups, _ = await runs.groups(run["id"], "train", EVERYTHING, step=step)
    chosen = chosen_group(request, groups)
    source = Source(
        title=run["name"],
        dataset=await runs.dataset_ref(run["id"]),
        colours=COLOURS,
    )
    values = {
        **await reader_values(request, source, groups, chosen, is_cut=is_cut),
        **await _new_grades(request, run["id"], chosen),
        "run": run,
        "step": step,
        "last": last,
    }
    if chosen is None:
        return values
    before = _neighbour(groups, chosen, -1)
    after = _neighbour(groups, chosen, 1)
    near = await runs.groups_of_row(run["id"], "train", chosen.dataset_row, near=step)
    return {
        **values,
        "same_row": [(there, slot_text(slot, replacement)) for there, slot, replacement in near],
        "before": before if before[0] >= 0 else None,
        "after": after if after[0] <= last else None,
    }


async def _new_grades(request: Request, run: str, chosen: GroupRow | None) -> Mapping[str, object]:
    """The grades of the chosen group in the regrade that the address names, by the sample's index."""
    identity = request.query_params.get("regrade")
    if not identity or chosen is None:
        return {"regrade": None, "regraded": {}}
    grades = await services(request).regrades.find_grades(identity, run, chosen.group)
    return {"regrade": identity, "regraded": {grade.index: grade for grade in grades}}


@dataclass(frozen=True, slots=True)
class Source:
    """The run or evaluation whose answers a page shows: its name, its dataset (as JSON), and the colours
    that its tokens can have."""

    title: str
    dataset: str | None
    colours: Sequence[str]


async def reader_values(
    request: Request,
    source: Source,
    groups: Sequence[GroupRow],
    chosen: GroupRow | None,
    *,
    is_cut: bool,
) -> Mapping[str, object]:
    """The values of a page about the chosen group and its answers. Raises InvalidConfig."""
    colour = _choice(request, "colour", source.colours)
    values = {
        "source": source,
        "groups": [_summary(group) for group in groups],
        "listed": listed_groups(groups, chosen),
        "chosen": chosen,
        "slot": slot_text(chosen.slot, chosen.replacement) if chosen else None,
        "order": _choice(request, "order", tuple(ORDERS)),
        "orders": tuple(ORDERS),
        "colour": colour,
        "colours": source.colours,
        "legend": legend(colour),
        "find": request.query_params.get("find", "")[:LONGEST_SEARCH],
        "regrade": None,
        "regraded": {},
    }
    if chosen is None:
        return values
    row, row_problem = await _row(request, source.dataset, chosen)
    return {
        **values,
        "row": row,
        "row_problem": row_problem,
        **await _answers(request, chosen, row, colour, is_cut=is_cut),
    }


async def _row(
    request: Request, dataset: str | None, group: GroupRow
) -> tuple[DatasetRow, str | None]:
    """The row that a group answers. Without its dataset an empty row, and a sentence about the reason:
    the answers can be read all the same, and they begin with the prompt."""
    nothing = DatasetRow(prompt=())
    try:
        return (await read_rows(request, dataset, [group])).get(group.dataset_row, nothing), None
    except (NotFound, TransientError) as error:
        return nothing, f"The row cannot be read now: {error}"


def chosen_group(request: Request, groups: Sequence[GroupRow]) -> GroupRow | None:
    """The group that `slot` names: `3`, `3.1` for the first group that took its place, or `last`. The
    first one without it. Raises InvalidConfig."""
    text = request.query_params.get("slot") or ""
    if text and text != LAST and not SLOT.fullmatch(text):
        message = f"must be a slot like 3 or 3.1, got {text[:20]!r}"
        raise InvalidConfig(f"slot {message}", issues=(Issue("slot", message),))
    if text == LAST:
        return groups[-1] if groups else None
    named = (one for one in groups if slot_text(one.slot, one.replacement) == text)
    return next(named, groups[0] if groups else None)


def slot_text(slot: int, replacement: int) -> str:
    """A group of a step in an address. Filtered groups are replaced, so a slot may have several."""
    return f"{slot}.{replacement}" if replacement else str(slot)


def _neighbour(groups: Sequence[GroupRow], chosen: GroupRow, distance: int) -> tuple[int, str]:
    """The step and slot of the group beside the chosen one: in another step its first or its last."""
    place = groups.index(chosen) + distance
    if 0 <= place < len(groups):
        return chosen.step, slot_text(groups[place].slot, groups[place].replacement)
    return chosen.step + distance, LAST if distance < 0 else ""


def listed_groups(groups: Sequence[GroupRow], chosen: GroupRow | None) -> Mapping[str, object]:
    """The groups in the list of a page: those around the chosen one, and the slots at which the lists
    before and after begin."""
    place = groups.index(chosen) if chosen else 0
    first = place // GROUPS_IN_LIST * GROUPS_IN_LIST
    after = first + GROUPS_IN_LIST
    slots = [slot_text(group.slot, group.replacement) for group in groups]
    made = {(group.slot, group.replacement) for group in groups}
    return {
        "groups": [
            {
                **_summary(group),
                "place": slot,
                "refuted": (group.slot, group.replacement + REFUTED) in made,
            }
            for group, slot in zip(groups[first:after], slots[first:after], strict=True)
        ],
        "before": slots[first - GROUPS_IN_LIST] if first else None,
        "after": slots[after] if after < len(groups) else None,
    }


def _choice(request: Request, name: str, choices: Sequence[str]) -> str:
    """The choice in the address; the first one if there is none."""
    chosen = request.query_params.get(name) or choices[0]
    if chosen not in choices:
        message = f"must be one of {', '.join(choices)}, got {chosen[:20]!r}"
        raise InvalidConfig(f"{name} {message}", issues=(Issue(name, message),))
    return chosen


def _summary(group: GroupRow) -> Mapping[str, object]:
    """A group in the list: its number, its row, and the mean and spread of its rewards. The mean counts
    samples that the policy made fail as 0."""
    grades = GRADES.validate_json(group.grades)
    rewards = [grade.reward for grade in grades if grade.reward is not None]
    counted = [one for grade in grades if (one := grade.counted_reward) is not None]
    return {
        "slot": group.slot,
        "dataset_row": group.dataset_row,
        "replacement": group.replacement,
        "mean": sum(counted) / len(counted) if counted else None,
        "least": min(rewards, default=None),
        "largest": max(rewards, default=None),
        "failed": len(grades) - len(rewards),
    }


async def _answers(
    request: Request, group: GroupRow, row: DatasetRow, colour: str, *, is_cut: bool
) -> Mapping[str, object]:
    """The answers of a page, in the order and with the words that the address asks for."""
    batch: SampleBatch = await read_batch(request, group)
    judged = await read_judgements(request, group)
    grades = {grade.index: grade for grade in GRADES.validate_json(group.grades)}
    rewards = [grade.reward for grade in grades.values() if grade.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    words = request.query_params.get("find", "")[:LONGEST_SEARCH]
    left = batch.grader_output
    wanted = [
        one
        for one in batch.samples
        if not words
        or find_text(one, words, judged, grade=grades.get(one.index), grader_output=left)
    ]
    branch = parse_choice(request.query_params.get("branch", ""))
    found = [
        answer(group, record, grades.get(record.index), judged, mean, branch) for record in wanted
    ]
    order = _choice(request, "order", tuple(ORDERS))
    found.sort(key=ORDERS[order])  # type: ignore[arg-type]  # each order has one type of key
    first = number(request, "first", default=0, least=0, most=MAX_STEP)
    shown = found[first : first + ANSWERS_PER_PAGE]
    records = {record.index: record for record in wanted}
    read = [records[index] for one in shown if isinstance(index := one["index"], int)]
    others = 0 if colour == "none" else sum(num_stretches(record) for record in read)
    most = share_of_text(read, others)
    for one in shown:
        one["num_given"] = num_given(cast("tuple[Message, ...]", one["messages"]), row.prompt)
    if colour != "none":
        largest = max((abs(reward - (mean or 0.0)) for reward in rewards), default=0.0)
        vocabulary = await _vocabulary(request, group)
        shown = [
            {**one, **tokens(one, record, vocabulary, colour, largest, most if is_cut else None)}
            for one, record in zip(shown, read, strict=True)
        ]
    return {
        "samples": shown,
        "num_found": len(found),
        "num_samples": len(batch.samples),
        "first": first,
        "per_page": ANSWERS_PER_PAGE,
        "most": most,
        "grader_output": batch.grader_output,
    }


async def _vocabulary(request: Request, group: GroupRow) -> Vocabulary | None:
    owner, core = GroupKey.parse(group.group).owner, services(request)
    try:
        model: ModelRef | None = (await core.lookup.run(owner)).model
    except NotFound:
        model = await _evaluated_model(request, owner)
    return await core.vocabularies.of(model) if model is not None else None


async def _evaluated_model(request: Request, evaluation: str) -> ModelRef | None:
    """The model of an evaluation (its id). The validations of a run are named after it, and have its
    model. That of an import is not here."""
    core = services(request)
    try:
        found = await core.lookup.evaluation(evaluation)
        return found.template.model if isinstance(found, EvaluationRequested) else None
    except NotFound:
        return (await core.lookup.run(evaluation.rpartition("v")[0])).model


async def show_search(request: Request) -> Response:
    """The samples that have the words of the address, the newest first."""
    run, _ = await find_run_with_history(request)
    words = request.query_params.get("text", "")
    found = await search_page(request, run["id"], words) if words.strip() else None
    hits = [(hit, slot_text(hit.slot, hit.replacement)) for hit in found.hits] if found else []
    return html(
        request,
        "sample_search.html",
        {
            "run": run,
            "words": words,
            "found": found,
            "hits": hits,
            "per_page": ANSWERS_PER_PAGE,
            "longest": LONGEST_SEARCH,
            "most_groups": MOST_GROUPS,
            "most_bytes": MOST_BYTES,
        },
    )


ROUTES = [
    PageRoute("/runs/{ref}/search", show_search, scope="read"),
    PageRoute("/runs/{ref}/search.json", search, scope="read"),
    PageRoute("/runs/{ref}/samples", index, scope="read"),
    PageRoute("/runs/{ref}/samples.json", data, scope="read"),
    PageRoute("/runs/{ref}/samples/{sample}/text", text, scope="read"),
    PageRoute("/runs/{ref}/samples/{sample}/files/{name:path}", file, scope="read"),
]
