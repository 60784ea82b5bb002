"""Datasets: the list with the uploads that were refused, and one with its statistics and first rows."""

from collections.abc import Mapping, Sequence

from pydantic_core import to_jsonable_python
from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.registry import DatasetJson, RejectedUpload
from producers.core.datasets import registration
from producers.core.datasets.column_statistics import DatasetStatistics
from producers.core.datasets.recent_statistics import read_head
from producers.core.datasets.row_issues import from_text
from producers.core.datasets.versions import split_version
from producers.dashboard.answers import LEAST_CHARACTERS, MOST_CHARACTERS
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import ApiResponse, page_of
from producers.http.routes.datasets import to_json
from producers.http.routes.runs import services
from schemas.datasets import DatasetRow
from schemas.errors import NotFound, TransientError
from schemas.events import DatasetRegistered

PREVIEWED_ROWS = 20
PREVIEWED_BYTES = 256 << 10
"""Bytes of a file that are read for its first rows."""

PREVIEWED_MESSAGES = 10
"""Messages of each row that are shown."""

PREVIEWED_CHARACTERS = 20_000
"""Characters of the first rows in all."""

SHOWN_REJECTED = 20


async def index(request: Request) -> Response:
    return html(request, "datasets.html", {**await _list(request), "page": page_of(request)})


async def index_json(request: Request) -> Response:
    """The same list as JSON."""
    return ApiResponse(await _list(request))


async def show(request: Request) -> Response:
    found, registered, rejected = await _find(request)
    statistics, reason = await _statistics(request, registered)
    rows, rows_reason = await _first_rows(request, registered)
    values = {
        "dataset": to_json(found, registered),
        "statistics": statistics,
        "reason": reason,
        "rejected": rejected and _rejected_json(rejected),
        "rows": rows,
        "rows_reason": rows_reason,
        "most_messages": PREVIEWED_MESSAGES,
        "most_characters": _share_of_text(rows),
    }
    return html(request, "dataset.html", values)


async def statistics_json(request: Request) -> Response:
    """The statistics of a dataset, and the upload under its name that was refused, as JSON."""
    found, registered, rejected = await _find(request)
    statistics, reason = await _statistics(request, registered)
    values = {
        "dataset": to_json(found, registered),
        "statistics": to_jsonable_python(statistics),
        "reason": reason,
        "rejected": rejected and _rejected_json(rejected),
    }
    return ApiResponse(values)


async def _list(request: Request) -> Mapping[str, object]:
    readmodel = services(request).readmodel
    rows, total = await readmodel.registry.datasets(page_of(request))
    rejected, num_rejected = await readmodel.uploads.list_rejected(SHOWN_REJECTED)
    return {
        "rows": [to_json(row) for row in rows],
        "total": total,
        "rejected": [_rejected_json(one) for one in rejected],
        "num_rejected": num_rejected,
    }


async def _find(
    request: Request,
) -> tuple[DatasetJson, DatasetRegistered | None, RejectedUpload | None]:
    """A dataset or an upload, its registration if it has one, and the last upload under its name if that
    was refused."""
    ref, core = request.path_params["ref"], services(request)
    name, version = split_version(ref)
    found = await core.readmodel.registry.dataset(name, version=version)
    if found is None:
        raise NotFound(f"there is no dataset {ref[:200]!r}; `headrace dataset list` shows all")
    registered = None
    if found["status"] == "uploaded":
        registered = await registration.find(core.log, core.readmodel.names, ref)
    return found, registered, await core.readmodel.uploads.find_rejected(found["id"])


async def _statistics(
    request: Request, registered: DatasetRegistered | None
) -> tuple[DatasetStatistics | None, str | None]:
    """The statistics of a dataset, or a sentence about why there are none."""
    if registered is None:
        return None, None
    try:
        found = await services(request).dataset_statistics.of(registered)
    except (NotFound, TransientError) as error:
        return None, f"The file cannot be read now: {error}"
    reason = "The rows are still being counted. Load the page again in some seconds."
    return found, None if found else reason


async def _first_rows(
    request: Request, registered: DatasetRegistered | None
) -> tuple[list[DatasetRow], str | None]:
    """The first rows, or a sentence about why there are none."""
    if registered is None:
        return [], "There is nothing to show yet."
    content = registered.dataset.content
    try:
        head = await read_head(services(request).blobs, content, PREVIEWED_BYTES)
    except (NotFound, TransientError) as error:
        return [], f"The file cannot be read now: {error}"
    lines = head.split(b"\n")
    if len(head) < content.size:
        lines.pop()
    rows = [DatasetRow.model_validate_json(line) for line in lines[:PREVIEWED_ROWS] if line]
    limit = f"The first row has more than {PREVIEWED_BYTES >> 10} KiB, so it is not shown."
    return rows, None if rows else limit


def _share_of_text(rows: Sequence[DatasetRow]) -> int:
    """How many characters of each text are shown, so that the page stays small."""
    num_answers = 2 if any(row.chosen is not None for row in rows) else 1
    count = sum(num_answers + min(PREVIEWED_MESSAGES, len(row.prompt)) for row in rows)
    groups = (row.trajectory.samples for row in rows if row.trajectory is not None)
    count += sum(min(PREVIEWED_MESSAGES, len(samples)) for samples in groups)
    return max(LEAST_CHARACTERS, min(MOST_CHARACTERS, PREVIEWED_CHARACTERS // max(1, count)))


def _rejected_json(upload: RejectedUpload) -> Mapping[str, object]:
    issues = [
        {
            "key": issue.key,
            "line": issue.line,
            "column": issue.column,
            "message": issue.message,
            "excerpt": issue.excerpt,
        }
        for issue in from_text(upload["issues"])
    ]
    return {**upload, "issues": issues}


ROUTES = [
    PageRoute("/datasets", index, scope="read"),
    PageRoute("/datasets.json", index_json, scope="read"),
    PageRoute("/datasets/{ref}", show, scope="read"),
    PageRoute("/datasets/{ref}/statistics.json", statistics_json, scope="read"),
]
