"""A form that submits an evaluation of a checkpoint, as a TOML that can be changed."""

from collections.abc import Mapping
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from producers.dashboard.forms import read_session_form
from producers.dashboard.pages.new_run import submit_request
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.dashboard.run_config import evaluation_toml
from producers.http.auth import actor_of
from producers.http.routes.runs import services
from schemas.errors import Issue, Refused

FIRST_TOML = """\
[experiment]
rollout = "my-rollout"
entrypoint = "main.py"
model_path = "my-run@best"
dataset = "my-held-out-dataset"

[evaluation]
limit = 100
batch_size = 20
"""


async def show(request: Request) -> Response:
    """The form. With `checkpoint` in the query it is filled in for that checkpoint's run."""
    checkpoint = request.query_params.get("checkpoint")
    if not checkpoint:
        return _page(request, FIRST_TOML, {})
    core = services(request)
    found = await core.lookup.checkpoint(checkpoint)
    row = await core.readmodel.runs.get_run(found.run.run)
    workspace = (row[0]["workspace"] if row else None) or ""
    text = evaluation_toml(found.run.config.model_dump_json(), found.ref)
    return _page(request, text, {"workspace": workspace})


async def answer(request: Request) -> Response:
    """Submit the evaluation and show it, or show what is wrong with the TOML."""
    fields = await read_session_form(request)
    text, core = fields.get("toml", ""), services(request)
    try:
        wanted = submit_request(fields, text, actor_of(request))
        # A second press of the button has the same key, so it makes no second evaluation.
        key = f"page/{actor_of(request).api_key}/{fields.get('once', '')[:64]}"
        recorded = await core.submitter.submit_eval(wanted, key=key)
    except Refused as error:
        issues = error.issues or (Issue("", error.message),)
        return _page(request, text, fields, issues=issues, status=error.status)
    await core.readmodel.caught_up(recorded.cursor)
    return RedirectResponse(f"/evals/{recorded.event.run_id}", status_code=303)


def _page(
    request: Request,
    text: str,
    fields: Mapping[str, str],
    *,
    issues: tuple[Issue, ...] = (),
    status: int = 200,
) -> Response:
    values = {
        "toml": text,
        "fields": fields,
        "issues": issues,
        "once": fields.get("once") or uuid4().hex,
    }
    return html(request, "new_evaluation.html", values, status=status)


ROUTES = [
    PageRoute("/new-evaluation", show, scope="submit"),
    PageRoute("/new-evaluation", answer, scope="submit", methods=["POST"]),
]
