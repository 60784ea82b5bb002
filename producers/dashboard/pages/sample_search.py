"""The search over the texts of all training samples of a run."""

from starlette.requests import Request
from starlette.responses import Response

from producers.core.history.sample_search import LONGEST_SEARCH, MOST_BYTES, MOST_GROUPS
from producers.dashboard.pages.samples import ANSWERS_PER_PAGE, slot_text
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.routes.runs import find_run_with_history
from producers.http.routes.samples import search, search_page


async def show(request: Request) -> Response:
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
    PageRoute("/runs/{ref}/search", show, scope="read"),
    PageRoute("/runs/{ref}/search.json", search, scope="read"),
]
