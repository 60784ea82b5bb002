"""Links that show one run to everyone who has them: the page that they open, and those that make and
revoke them.

The page of a link has what this module lists and nothing else of the run: no log, samples, config,
commit, workspace, people, notes or error, because they may name what its visitor must not learn.
"""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from infra.identity.shares import DEFAULT_DAYS, MOST_DAYS
from infra.ports.actor import Actor, acting_as
from infra.readmodel.runs import RunJson
from producers.core.history.metric_titles import TITLES
from producers.dashboard.forms import read_session_form
from producers.dashboard.pages.run import DRAWN, SVG_POINTS, drawing, figures_of, main_keys
from producers.dashboard.pages.runs import progress, progress_text, times_left
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.browsers import SHARED
from producers.http.routes.runs import find_run, services
from producers.http.routes.shares import close_share, new_share
from schemas.errors import InvalidConfig, Issue, NotFound

NOT_FOUND = (
    "this link is unknown, has expired, or was revoked; ask the person who sent it for another"
)
HIDDEN = {"X-Robots-Tag": "noindex, nofollow, noarchive", "Referrer-Policy": "no-referrer"}


async def show(request: Request) -> Response:
    """The run that the key of a link shows. Raises NotFound."""
    core = services(request)
    run_id = await core.shares.find_run(request.query_params.get("key", ""))
    found = await core.readmodel.runs.get_run(run_id) if run_id else None
    if found is None or found[0]["id"] != run_id:
        raise NotFound(NOT_FOUND)
    run = found[0]
    # Nothing of another workspace exists for the queries of this page.
    with acting_as(Actor("share", "share", frozenset(), workspace=run["workspace"])):
        return await _page(request, run)


async def _page(request: Request, run: RunJson) -> Response:
    core, now = services(request), services(request).clock.now()
    runs = core.readmodel.runs
    sampled = await runs.sampled_curves(run["id"], DRAWN, most=SVG_POINTS)
    left = await times_left(runs, [run], now)
    drawn = [drawing(main_keys(run), sampled, is_large=True)]
    drawn += [drawing((key,), sampled) for key in TITLES if key not in main_keys(run)]
    answer = html(
        request,
        "shared_run.html",
        {
            "run": {name: value for name, value in run.items() if name in SHOWN},
            "progress": progress(run),
            "progress_text": progress_text(run, left.get(run["id"])),
            "figures": [
                one for one in await figures_of(runs, run, now=now) if one.value is not None
            ],
            "drawn": [one for one in drawn if one["has_points"]],
        },
    )
    answer.headers.update(HIDDEN)
    return answer


SHOWN: Sequence[str] = ("name", "status", "phase", "algorithm", "model", "dataset", "created_at")


async def index(request: Request) -> Response:
    """The links of a run, and a form for another."""
    run, _ = await find_run(request)
    return await _list(request, run)


async def _list(request: Request, run: RunJson, made: object = None) -> Response:
    return html(
        request,
        "shares.html",
        {
            "run": run,
            "shares": await services(request).shares.of_run(run["id"]),
            "made": made,
            "days": DEFAULT_DAYS,
            "most_days": MOST_DAYS,
        },
    )


async def create(request: Request) -> Response:
    """Make a link, and show it once."""
    text = (await read_session_form(request)).get("days", "")
    run, _ = await find_run(request)
    is_number = text.isascii() and text.isdigit() and len(text) < 4
    if not is_number or not 1 <= int(text) <= MOST_DAYS:
        message = f"must be a whole number from 1 to {MOST_DAYS}, got {text[:20]!r}"
        raise InvalidConfig(f"days {message}", issues=(Issue("days", message),))
    made = await new_share(request, int(text))
    return await _list(request, run, made)


async def revoke(request: Request) -> Response:
    """Revoke a link, and go back to the list."""
    await read_session_form(request)
    await close_share(request)
    run, _ = await find_run(request)
    return RedirectResponse(f"/runs/{run['id']}/shares", status_code=303)


ROUTES = [
    PageRoute(SHARED, show, scope="open"),
    PageRoute("/runs/{ref}/shares", index, scope="control"),
    PageRoute("/runs/{ref}/shares", create, scope="control", methods=["POST"]),
    PageRoute("/runs/{ref}/shares/{share}/revoke", revoke, scope="control", methods=["POST"]),
]
