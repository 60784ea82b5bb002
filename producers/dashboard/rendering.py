"""Turns templates into responses.

All text of users is escaped by the templates. The headers forbid everything else: code that is not a
file of this server, styles in the page, and frames.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from infra.identity.sessions import form_key
from producers.dashboard import formats
from producers.dashboard.assets import asset_url
from producers.http.browsers import REPORTS, bearer_of

TEMPLATES = Path(__file__).parent / "templates"

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
        f"report-uri {REPORTS}"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Vary": "Cookie",
}


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(formats.FILTERS)
    environment.globals["asset"] = asset_url
    return environment


def html(
    request: Request, template: str, values: Mapping[str, object], *, status: int = 200
) -> HTMLResponse:
    """The page that a template makes of these values. Templates also know the request's path, its actor
    and the key of its session's forms."""
    state = request.scope.get("state") or {}
    bearer = bearer_of(state)
    text = (
        _environment()
        .get_template(template)
        .render(
            {
                "path": request.url.path,
                "query": dict(request.query_params),
                "actor": state.get("actor"),
                "form_key": form_key(bearer) if bearer else "",
                **values,
            }
        )
    )
    # What no encoding takes is in no stored text, but it may be in an address.
    content = text.encode("utf-8", "replace")
    return HTMLResponse(content, status_code=status, headers=HEADERS)
