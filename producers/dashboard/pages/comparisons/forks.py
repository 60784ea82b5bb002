"""The tree of forks around a run: the runs that it continues, and its own forks, a page at a time."""

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.runs import PageRange, RunJson
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import page_of
from producers.http.routes.runs import find_run, services

MOST_ANCESTORS = 100


async def index(request: Request) -> Response:
    run, _ = await find_run(request)
    page = page_of(request)
    forks, total = await services(request).readmodel.run_pages.forks(run["id"], page)
    values = {
        "run": run,
        "ancestors": await _ancestors(request, run),
        "forks": forks,
        "total": total,
        "first": page.offset + 1,
        "previous": max(0, page.offset - page.limit) if page.offset else None,
        "following": page.offset + page.limit if page.offset + page.limit < total else None,
    }
    return html(request, "forks.html", values)


async def first_forks(request: Request, run: RunJson, *, most: int) -> tuple[list[RunJson], int]:
    """The oldest forks of a run, and how many it has."""
    pages = services(request).readmodel.run_pages
    return await pages.forks(run["id"], PageRange(limit=most))


async def _ancestors(request: Request, run: RunJson) -> list[RunJson]:
    """The runs that a run continues, the oldest first; at most MOST_ANCESTORS of the nearest."""
    found: list[RunJson] = []
    parent = run["parent"]
    while parent is not None and len(found) < MOST_ANCESTORS:
        row = await services(request).readmodel.runs.get_run(parent)
        if row is None:
            break
        found.insert(0, row[0])
        parent = row[0]["parent"]
    return found


ROUTES = [PageRoute("/runs/{ref}/forks", index, scope="read")]
