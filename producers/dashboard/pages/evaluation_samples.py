"""The answers to one row of an evaluation, side by side."""

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.runs import GroupRow
from producers.dashboard.pages.samples import (
    EVERYTHING,
    Source,
    chosen_group,
    group_json,
    reader_values,
    sample_text,
    slot_text,
)
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import number
from producers.http.routes.evaluations import find_evaluation
from producers.http.routes.runs import services
from producers.http.routes.samples import MAX_STEP, sample_file
from schemas.errors import NotFound

COLOURS = ("none", "logprob")
"""Nothing is trained with these tokens, so they have no advantage."""


async def index(request: Request) -> Response:
    return html(request, "samples.html", await _values(request, is_cut=True))


async def data(request: Request) -> Response:
    """The same group as JSON."""
    return group_json(await _values(request, is_cut=False))


async def text(request: Request) -> Response:
    """Everything that was said in one attempt, or the one text that `part` names."""
    found = await find_evaluation(request, request.path_params["ref"])
    return await sample_text(request, found["id"])


async def file(request: Request) -> Response:
    """A file that the workflow of an attempt left behind, to download."""
    found = await find_evaluation(request, request.path_params["ref"])
    return await sample_file(request, found["id"])


async def _values(request: Request, *, is_cut: bool) -> Mapping[str, object]:
    found = await find_evaluation(request, request.path_params["ref"])
    runs = services(request).readmodel.runs
    groups, _ = await runs.groups(found["id"], "evaluate", EVERYTHING)
    chosen = _choose(request, groups)
    source = Source(
        title=found["name"],
        dataset=found["dataset_ref"],
        colours=COLOURS,
    )
    values = await reader_values(request, source, groups, chosen, is_cut=is_cut)
    if chosen is None:
        return {**values, "run": None, "step": 0, "last": 0}
    place = groups.index(chosen)
    before, after = groups[:place][-1:], groups[place + 1 :][:1]
    return {
        **values,
        "run": None,
        "step": chosen.step,
        "last": chosen.step,
        "same_row": [],
        "before": _place(before),
        "after": _place(after),
    }


def _place(groups: Sequence[GroupRow]) -> tuple[int, str] | None:
    return next(((one.step, slot_text(one.slot, one.replacement)) for one in groups), None)


def _choose(request: Request, groups: Sequence[GroupRow]) -> GroupRow | None:
    """The group with the `slot` or the dataset `row` that the query names, and else the first one.
    Raises NotFound for a row without graded answers."""
    row = number(request, "row", default=-1, least=0, most=MAX_STEP)
    if row >= 0:
        of_row = [group for group in groups if group.dataset_row == row]
        if not of_row:
            raise NotFound(f"no answer to row {row} is graded; the evaluation lists its rows")
        return of_row[0]
    return chosen_group(request, groups)


ROUTES = [
    PageRoute("/evals/{ref}/samples", index, scope="read"),
    PageRoute("/evals/{ref}/samples.json", data, scope="read"),
    PageRoute("/evals/{ref}/samples/{sample}/text", text, scope="read"),
    PageRoute("/evals/{ref}/samples/{sample}/files/{name:path}", file, scope="read"),
]
