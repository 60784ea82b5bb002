"""The API keys: a list, a form for another, and buttons that rotate and revoke them. The text
of a key is on the page that answers its form, and nowhere else. And the open sessions of the reader,
with the button that ends them all."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from infra.identity.api_keys import ApiKey
from infra.identity.issuing import LIFETIME_S, LONGEST_OVERLAP_S, LONGEST_S, NEVER, WantedApiKey
from infra.identity.sessions import holder_of, session_id
from infra.ports.actor import SCOPES
from producers.dashboard.forms import read_session_form
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.auth import actor_of
from producers.http.browsers import cookie_name, cookie_of
from producers.http.responses import flag, page_of
from producers.http.routes.access import api_keys, sessions
from producers.http.routes.runs import services
from schemas.errors import InvalidConfig, Issue, Refused

DAY_S, HOUR_S = 24 * 3600, 3600
DAYS, MOST_DAYS = int(LIFETIME_S) // DAY_S, LONGEST_S // DAY_S
HOURS, MOST_HOURS = 1, LONGEST_OVERLAP_S // HOUR_S


async def index(request: Request) -> Response:
    return await _page(request, {})


async def redirect_old_path(_: Request) -> Response:
    """Lead the bookmark of a reader to the page's new address."""
    return RedirectResponse("/api-keys", status_code=308)


async def create(request: Request) -> Response:
    """Make an API key, and show it once."""
    fields = await read_session_form(request)
    core = services(request)
    workspace = fields.get("workspace", "").strip()
    try:
        wanted = WantedApiKey(
            name=fields.get("name", "").strip(),
            scopes=[scope for scope in SCOPES if f"scope.{scope}" in fields],
            owner=fields.get("owner", "").strip() or None,
            workspace=(await core.workspaces.find_workspace(workspace)).id if workspace else None,
            expires_s=_lifetime_in(fields),
        )
        api_key, issued = await core.api_key_issuer.create(wanted, actor_of(request))
    except Refused as error:
        return await _refusal(request, fields, error)
    return await _page(request, {}, made=(api_key, issued.text))


async def rotate(request: Request) -> Response:
    """Give an API key a new secret, and show it once."""
    fields = await read_session_form(request)
    core, ref = services(request), request.path_params["ref"]
    found = await core.api_keys.find(
        ref, workspace=actor_of(request).workspace, organisation=actor_of(request).organisation
    )
    try:
        api_key, issued = await core.api_key_issuer.rotate(
            found.id,
            actor_of(request),
            overlap_s=_number(fields, "hours", 0, MOST_HOURS) * HOUR_S,
            expires_s=None,
        )
    except Refused as error:
        return await _refusal(request, {}, error)
    return await _page(request, {}, made=(api_key, issued.text))


async def revoke(request: Request) -> Response:
    await read_session_form(request)
    await services(request).api_key_issuer.revoke(request.path_params["ref"], actor_of(request))
    return RedirectResponse("/api-keys", status_code=303)


async def _refusal(request: Request, fields: Mapping[str, str], error: Refused) -> Response:
    issues = error.issues or (Issue("", error.message),)
    return await _page(request, fields, issues=issues, status=error.status)


async def _page(
    request: Request,
    fields: Mapping[str, str],
    *,
    made: tuple[ApiKey, str] | None = None,
    issues: tuple[Issue, ...] = (),
    status: int = 200,
) -> Response:
    core, actor, page = services(request), actor_of(request), page_of(request)
    revoked = flag(request, "revoked")
    found, total = await core.api_keys.page(
        workspace=actor.workspace,
        organisation=actor.organisation,
        revoked=revoked,
        limit=page.limit,
        offset=page.offset,
    )
    now = core.clock.now()
    values = {
        "rows": [(one, one.is_valid(now)) for one in found],
        "names": {
            workspace: await _workspace_name(request, workspace)
            for workspace in {one.workspace for one in found}
        },
        "page": page,
        "total": total,
        "revoked": revoked,
        "scopes": [scope for scope in SCOPES if actor.may(scope)],
        "fields": fields,
        "days": DAYS,
        "most_days": MOST_DAYS,
        "hours": HOURS,
        "most_hours": MOST_HOURS,
        "made": made,
        "issues": issues,
    }
    return html(request, "api_keys.html", values, status=status)


async def _workspace_name(request: Request, workspace: str | None) -> str | None:
    """The name of a workspace; its id until the read model has it."""
    if workspace is None:
        return None
    found = await services(request).readmodel.registry.workspace(workspace)
    return workspace if found is None else found["name"]


def _lifetime_in(fields: Mapping[str, str]) -> float:
    return NEVER if "never" in fields else _number(fields, "days", 1, MOST_DAYS) * DAY_S


def _number(fields: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = fields.get(name, "").strip()
    is_number = text.isascii() and text.isdigit() and len(text) < 6
    if not is_number or not least <= int(text) <= most:
        message = f"must be a whole number from {least} to {most}, got {text[:20]!r}"
        raise InvalidConfig(f"{name} {message}", issues=(Issue(name, f"{name} {message}"),))
    return int(text)


async def show_sessions(request: Request) -> Response:
    core = services(request)
    cookie = cookie_of(request.headers, name=cookie_name(core.settings.public_url))
    actor = actor_of(request)
    found = await core.sessions.list_open(holder_of(actor))
    person = await core.people.find(actor.person_id) if actor.person_id else None
    values = {
        "sessions": found,
        "here": session_id(cookie),
        "person": person,
        "has_organisations": person is not None and core.settings.oidc is not None,
    }
    return html(request, "sessions.html", values)


async def end_sessions(request: Request) -> Response:
    """Sign the reader out everywhere, here too."""
    await read_session_form(request)
    await services(request).sessions.end_all(holder_of(actor_of(request)))
    return RedirectResponse("/login", status_code=303)


ROUTES = [
    PageRoute("/api-keys", index, scope="admin"),
    PageRoute(api_keys.OLD_PATH, redirect_old_path, scope="admin"),
    PageRoute("/api-keys.json", api_keys.index, scope="admin"),
    PageRoute("/api-keys", create, scope="admin", methods=["POST"]),
    PageRoute("/api-keys/{ref}/rotate", rotate, scope="admin", methods=["POST"]),
    PageRoute("/api-keys/{ref}/revoke", revoke, scope="admin", methods=["POST"]),
    PageRoute("/sessions", show_sessions, scope="read"),
    PageRoute("/sessions.json", sessions.index, scope="read"),
    PageRoute("/sessions/end", end_sessions, scope="read", methods=["POST"]),
]
