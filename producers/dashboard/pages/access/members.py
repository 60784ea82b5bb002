"""The members of the reader's organisation. Owners invite people, change roles and remove members here,
and everybody else sees the list."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from infra.identity.organisations import Organisation
from infra.ports.actor import MAIN, ROLES
from producers.dashboard.forms import read_session_form
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.auth import actor_of
from producers.http.responses import page_of
from producers.http.routes.access.members import link_of, remove_member
from producers.http.routes.access.organisations import find_organisation
from producers.http.routes.runs import services
from schemas.errors import Refused

PAGE = "/members"


async def index(request: Request) -> Response:
    return await _page(request)


async def invite(request: Request) -> Response:
    """Make an invitation, and show its link once."""
    fields = await read_session_form(request)
    core, organisation = services(request), await _organisation(request)
    try:
        _, code = await core.invitations.invite(
            organisation.id,
            fields.get("role", ""),
            fields.get("email", "").strip() or None,
            actor_of(request),
        )
    except Refused as error:
        return await _page(request, fields, problem=error)
    return await _page(request, link=link_of(core.settings.public_url, code))


async def change_role(request: Request) -> Response:
    fields = await read_session_form(request)
    core, organisation = services(request), await _organisation(request)
    found = await core.members.find(organisation.id, request.path_params["ref"])
    try:
        await core.members.change_role(organisation.id, found.person.id, fields.get("role", ""))
    except Refused as error:
        return await _page(request, problem=error)
    return RedirectResponse(PAGE, status_code=303)


async def remove(request: Request) -> Response:
    """Remove a member, or let the reader leave, whose session then ends."""
    await read_session_form(request)
    organisation = await _organisation(request)
    try:
        await remove_member(request, organisation, request.path_params["ref"])
    except Refused as error:
        if error.status == 404:
            raise
        return await _page(request, problem=error)
    return RedirectResponse(PAGE, status_code=303)


async def revoke_invitation(request: Request) -> Response:
    await read_session_form(request)
    organisation = await _organisation(request)
    await services(request).invitations.revoke(organisation.id, request.path_params["ref"])
    return RedirectResponse(PAGE, status_code=303)


async def _organisation(request: Request) -> Organisation:
    """The organisation of the reader's API key. That of an administrator of the installation is named in
    the address, and else it is the first one."""
    actor = actor_of(request)
    ref = actor.organisation or request.query_params.get("organisation") or MAIN
    return await find_organisation(request, ref)


async def _page(
    request: Request,
    fields: Mapping[str, str] | None = None,
    *,
    link: str = "",
    problem: Refused | None = None,
) -> Response:
    core, actor, page = services(request), actor_of(request), page_of(request)
    organisation = await _organisation(request)
    found, total = await core.members.page(organisation.id, limit=page.limit, offset=page.offset)
    is_owner = actor.may("admin")
    open_ones = await core.invitations.list_open(organisation.id) if is_owner else []
    values = {
        "organisation": organisation,
        "members": found,
        "total": total,
        "page": page,
        "roles": ROLES,
        "is_owner": is_owner,
        "invitations": open_ones,
        "quotas": await core.quotas.show_organisation(organisation.id),
        "fields": fields or {},
        "link": link,
        "problem": "" if problem is None else problem.message,
    }
    return html(request, "members.html", values, status=200 if problem is None else problem.status)


ROUTES = [
    PageRoute(PAGE, index, scope="read", reach="organisation"),
    PageRoute(PAGE, invite, scope="admin", reach="organisation", methods=["POST"]),
    PageRoute(
        PAGE + "/{ref}/role", change_role, scope="admin", reach="organisation", methods=["POST"]
    ),
    PageRoute(PAGE + "/{ref}/remove", remove, scope="read", reach="organisation", methods=["POST"]),
    PageRoute(
        "/invitations/{ref}/revoke",
        revoke_invitation,
        scope="admin",
        reach="organisation",
        methods=["POST"],
    ),
]
