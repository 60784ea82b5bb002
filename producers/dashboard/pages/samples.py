"""The samples of a run: the groups of a step, and the answers of one group side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from pydantic_core import to_jsonable_python
from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.runs import GroupRow, PageRange
from producers.dashboard.answers import ORDERS, answer, has_text, share_of_text, whole_text
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import ApiResponse, number
from producers.http.routes.runs import find_run_with_history, services
from producers.http.routes.samples import (
    GRADES,
    MAX_STEP,
    find_sample,
    read_batch,
    read_judgements,
    read_rows,
    sample_file,
)
from schemas.datasets import DatasetRow
from schemas.errors import InvalidConfig, Issue
from schemas.sampling import SampleBatch

EVERYTHING = PageRange(limit=MAX_STEP)
ANSWERS_PER_PAGE = 8
LONGEST_SEARCH = 200


async def index(request: Request) -> Response:
    values = await _values(request)
    return html(request, "samples.html", values)


async def data(request: Request) -> Response:
    """The same group as JSON."""
    values = await _values(request)
    chosen = values["chosen"]
    left_out = {"run", "orders", "row", "chosen", "most"}
    shown = {key: value for key, value in values.items() if key not in left_out}
    group = asdict(chosen)["group"] if isinstance(chosen, GroupRow) else None
    content = to_jsonable_python({**shown, "group": group}, inf_nan_mode="null")
    return ApiResponse(content)


async def text(request: Request) -> Response:
    """Everything that was said in one sample, as a text to download."""
    run, _ = await find_run_with_history(request)
    _, _, record = await find_sample(request, run["id"])
    return Response(
        whole_text(record).encode("utf-8", "replace"),
        media_type="text/plain",
        headers={"Content-Disposition": 'attachment; filename="sample.txt"'},
    )


async def file(request: Request) -> Response:
    """A file that the workflow of a sample left behind, to download."""
    run, _ = await find_run_with_history(request)
    return await sample_file(request, run["id"])


async def _values(request: Request) -> Mapping[str, object]:
    run, _ = await find_run_with_history(request)
    runs = services(request).readmodel.runs
    last = max(1, run["current_step"] or 1)
    step = number(request, "step", default=last, least=0, most=MAX_STEP)
    slot = number(request, "slot", default=-1, least=0, most=MAX_STEP)
    groups, _ = await runs.groups(run["id"], "train", EVERYTHING, step=step)
    chosen = next((group for group in groups if group.slot == slot), groups[0] if groups else None)
    dataset = await runs.dataset_ref(run["id"])
    values = {
        "run": run,
        "step": step,
        "last": last,
        "groups": [_summary(group) for group in groups],
        "chosen": chosen,
        "order": _order(request),
        "orders": tuple(ORDERS),
        "find": request.query_params.get("find", "")[:LONGEST_SEARCH],
    }
    if chosen is None:
        return values
    rows = await read_rows(request, dataset, [chosen])
    steps = await runs.groups_of_row(run["id"], "train", chosen.dataset_row, near=step)
    return {
        **values,
        "row": rows.get(chosen.dataset_row, DatasetRow(prompt=())),
        "same_row": steps,
        "before": _neighbour(groups, chosen, -1),
        "after": _neighbour(groups, chosen, 1),
        **await _answers(request, chosen),
    }


def _neighbour(
    groups: Sequence[GroupRow], chosen: GroupRow, distance: int
) -> tuple[int, int | None]:
    """The step and slot of the group beside the chosen one. The first slot of a step is None."""
    place = groups.index(chosen) + distance
    if 0 <= place < len(groups):
        return chosen.step, groups[place].slot
    return chosen.step + distance, None


def _order(request: Request) -> str:
    order = request.query_params.get("order") or "index"
    if order not in ORDERS:
        message = f"must be one of {', '.join(ORDERS)}, got {order[:20]!r}"
        raise InvalidConfig(f"order {message}", issues=(Issue("order", message),))
    return order


def _summary(group: GroupRow) -> Mapping[str, object]:
    """A group in the list: its number, its row, and the mean and spread of its rewards."""
    grades = GRADES.validate_json(group.grades)
    rewards = [grade.reward for grade in grades if grade.reward is not None]
    return {
        "slot": group.slot,
        "dataset_row": group.dataset_row,
        "replacement": group.replacement,
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "least": min(rewards, default=None),
        "largest": max(rewards, default=None),
        "failed": len(grades) - len(rewards),
    }


async def _answers(request: Request, group: GroupRow) -> Mapping[str, object]:
    """The answers of a page, in the order and with the words that the address asks for."""
    batch: SampleBatch = await read_batch(request, group)
    judged = await read_judgements(request, group)
    grades = {grade.index: grade for grade in GRADES.validate_json(group.grades)}
    rewards = [grade.reward for grade in grades.values() if grade.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    words = request.query_params.get("find", "")[:LONGEST_SEARCH]
    wanted = [record for record in batch.samples if not words or has_text(record, words)]
    found = [answer(group, record, grades.get(record.index), judged, mean) for record in wanted]
    found.sort(key=ORDERS[_order(request)])  # type: ignore[arg-type]  # each order has one type of key
    first = number(request, "first", default=0, least=0, most=MAX_STEP)
    shown = found[first : first + ANSWERS_PER_PAGE]
    indexes = {one["index"] for one in shown}
    return {
        "samples": shown,
        "num_found": len(found),
        "num_samples": len(batch.samples),
        "first": first,
        "per_page": ANSWERS_PER_PAGE,
        "most": share_of_text([record for record in wanted if record.index in indexes]),
        "grader_output": batch.grader_output,
    }


ROUTES = [
    PageRoute("/runs/{ref}/samples", index, scope="read"),
    PageRoute("/runs/{ref}/samples.json", data, scope="read"),
    PageRoute("/runs/{ref}/samples/{sample}/text", text, scope="read"),
    PageRoute("/runs/{ref}/samples/{sample}/files/{name:path}", file, scope="read"),
]
