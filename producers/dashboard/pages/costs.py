"""The costs of runs, workspaces and users, as the cost ledger says them."""

from starlette.requests import Request
from starlette.responses import Response

from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.costs import cost_document

SHOWN_KEYS = ("run", "workspace", "organisation", "user")
TIMES = ("", "1d", "7d", "30d")


async def index(request: Request) -> Response:
    found = await cost_document(request)
    query = request.query_params
    chosen = {"keys": SHOWN_KEYS, "times": TIMES, "since_text": query.get("since", "")}
    return html(request, "costs.html", {**found, **chosen})


ROUTES = [PageRoute("/cost", index, scope="read")]
