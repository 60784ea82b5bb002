"""The page of an invitation's link. It makes a person, or lets the person join who is signed in, and
shows the person's first API key once. The browser is signed in with that key."""

from starlette.requests import Request
from starlette.responses import Response

from infra.identity.invitations import ENDED, Welcome
from infra.identity.sessions import Bearer, form_key, is_form_key
from producers.dashboard.forms import KEY, ForeignForm, read_form
from producers.dashboard.pages.access.sign_in import set_session, signed_in_bearer
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.browsers import JOIN, comes_from_here
from producers.http.routes.runs import services
from schemas.errors import Refused


async def show(request: Request) -> Response:
    """The invitation. To open the page uses nothing up."""
    return await _page(request, request.query_params.get("code", ""))


async def join(request: Request) -> Response:
    """Use the invitation up, for a new person or for the one who is signed in."""
    core = services(request)
    if not comes_from_here(request.scope, request.headers, public_url=core.settings.public_url):
        raise ForeignForm("the form does not come from a page of this server; open the link again")
    fields = await read_form(request)
    code = fields.get("code", "")
    try:
        if KEY in fields:
            welcome = await core.invitations.accept_as(code, await _person_of(request, fields[KEY]))
        else:
            welcome = await core.invitations.accept(
                code, fields.get("name", ""), fields.get("email", "")
            )
    except Refused as error:
        return await _page(request, code, problem=error.message, status=error.status)
    return await _welcome(request, welcome)


async def _welcome(request: Request, welcome: Welcome) -> Response:
    core = services(request)
    organisation = str(welcome.api_key.organisation)
    answer = html(request, "joined.html", {"welcome": welcome, "organisation": organisation})
    cookie = await core.sessions.open(Bearer(welcome.api_key.id, welcome.api_key.sha256))
    set_session(answer, cookie, core.settings.public_url)
    return answer


async def _person_of(request: Request, key: str) -> str:
    """The person who is signed in. Raises ForeignForm unless the form belongs to the session."""
    bearer = await signed_in_bearer(request)
    if bearer is None or not is_form_key(key, bearer):
        raise ForeignForm("the form does not belong to your session; open the link again")
    person = await _person_with(request, bearer)
    if person is None:
        raise ForeignForm("you are not signed in as a person; open the link again")
    return person


async def _person_with(request: Request, bearer: Bearer) -> str | None:
    """The person (an id) to whom the API key of a session belongs; None for a key of nobody."""
    core = services(request)
    found = await core.recent_api_keys.find_digest(bearer.api_key, bearer.sha256)
    return found.person if found is not None and found.is_valid(core.clock.now()) else None


async def _page(request: Request, code: str, *, problem: str = "", status: int = 200) -> Response:
    core = services(request)
    found = await core.invitations.find(code)
    if found is None:
        ended = {"title": "This link does not work", "message": ENDED}
        return html(request, "error.html", ended, status=401)
    invitation, title = found
    bearer = await signed_in_bearer(request)
    person_id = await _person_with(request, bearer) if bearer else None
    person = await core.people.find(person_id) if person_id else None
    values = {
        "code": code,
        "invitation": invitation,
        "organisation": title,
        "person": person,
        "session_key": form_key(bearer) if person and bearer else "",
        "problem": problem,
    }
    return html(request, "join.html", values, status=status)


ROUTES = [
    PageRoute(JOIN, show, scope="open"),
    PageRoute(JOIN, join, scope="open", methods=["POST"]),
]
