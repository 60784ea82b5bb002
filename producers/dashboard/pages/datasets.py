"""Datasets: the list, and one with its columns and first rows."""

from starlette.requests import Request
from starlette.responses import Response

from producers.core.datasets import registration
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.downloads import first_lines
from producers.http.responses import page_of
from producers.http.routes.datasets import to_json
from producers.http.routes.runs import services
from schemas.datasets import DatasetRow
from schemas.errors import NotFound

PREVIEWED_ROWS = 20


async def index(request: Request) -> Response:
    page = page_of(request)
    rows, total = await services(request).readmodel.registry.datasets(page)
    values = {"rows": [to_json(row) for row in rows], "total": total, "page": page}
    return html(request, "datasets.html", values)


async def show(request: Request) -> Response:
    ref = request.path_params["ref"]
    found = await services(request).readmodel.registry.dataset(ref)
    if found is None:
        raise NotFound(f"there is no dataset {ref[:200]!r}; `headrace dataset list` shows all")
    rows: list[DatasetRow] = []
    registered = None
    if found["status"] == "uploaded":
        registered = await registration.find(services(request).log, ref)
        lines = await first_lines(request, registered.dataset.content, PREVIEWED_ROWS)
        rows = [DatasetRow.model_validate_json(line) for line in lines]
    values = {"dataset": to_json(found, registered), "rows": rows}
    return html(request, "dataset.html", values)


ROUTES = [
    PageRoute("/datasets", index, scope="read"),
    PageRoute("/datasets/{ref}", show, scope="read"),
]
