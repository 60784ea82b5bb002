"""The members of an organisation, invitations into it, and the people of the installation."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from infra.identity.invitations import Invitation
from infra.identity.issuing import BeyondRights
from infra.identity.members import OrganisationMember
from infra.identity.organisations import Organisation
from infra.identity.people import Person
from infra.ports.actor import ROLE_SCOPES, Actor
from producers.http.auth import actor_of
from producers.http.requests import body_of
from producers.http.responses import ApiResponse, flag, page_of, page_response
from producers.http.routes.access.organisations import find_organisation
from producers.http.routes.runs import services
from producers.http.routing import Reach, ScopedRoute


def member_to_json(member: OrganisationMember) -> Mapping[str, object]:
    """A member as JSON."""
    return {
        "id": member.person.id,
        "name": member.person.name,
        "email": member.person.email,
        "role": member.role,
        "joined_at": member.joined_at,
        "from_groups": member.from_groups,
    }


def invitation_to_json(invitation: Invitation) -> Mapping[str, object]:
    """An invitation as JSON, without its code."""
    return {
        "id": invitation.id,
        "role": invitation.role,
        "email": invitation.email,
        "created_at": invitation.created_at,
        "created_by": invitation.created_by,
        "expires_at": invitation.expires_at,
    }


def link_of(public_url: str, code: str) -> str:
    """The link of an invitation."""
    return f"{public_url.rstrip('/')}/join?code={code}"


async def remove_member(
    request: Request, organisation: Organisation, ref: str
) -> OrganisationMember:
    """Remove a member, or let the sender leave. Raises BeyondRights when another member is meant and the
    sender's API key lacks the scope admin, or when the key may less than the member's role. The removal
    ends all keys of the member, which a key that was made for less must not do."""
    core, actor = services(request), actor_of(request)
    found = await core.members.find(organisation.id, ref)
    _check_may_change(actor, found)
    await core.members.remove(organisation.id, found.person.id)
    return found


def _check_may_change(actor: Actor, member: OrganisationMember) -> None:
    if not actor.may("admin") and member.person.id != actor.person_id:
        raise BeyondRights("only owners remove other members; ask an owner of the organisation")
    if not all(actor.may(scope) for scope in ROLE_SCOPES[member.role]):
        raise BeyondRights(
            f"leaving needs an API key with all that the role {member.role} allows, and yours has "
            f"{', '.join(sorted(actor.scopes))}; use one that `headrace login` gives"
        )


async def _organisation(request: Request) -> Organisation:
    return await find_organisation(request, request.path_params["organisation"])


async def index(request: Request) -> Response:
    organisation, page = await _organisation(request), page_of(request)
    found, total = await services(request).members.page(
        organisation.id, limit=page.limit, offset=page.offset
    )
    return page_response("members", [member_to_json(one) for one in found], total, page)


async def change_role(request: Request) -> Response:
    organisation, core = await _organisation(request), services(request)
    body = await body_of(request, ("role",))
    found = await core.members.find(organisation.id, request.path_params["ref"])
    await core.members.change_role(organisation.id, found.person.id, body.text("role"))
    changed = await core.members.find(organisation.id, found.person.id)
    return ApiResponse({"member": member_to_json(changed)})


async def remove(request: Request) -> Response:
    organisation = await _organisation(request)
    removed = await remove_member(request, organisation, request.path_params["ref"])
    return ApiResponse({"removed": removed.person.id, "name": removed.person.name})


async def invitations(request: Request) -> Response:
    organisation = await _organisation(request)
    found = await services(request).invitations.list_open(organisation.id)
    return ApiResponse(
        {"invitations": [invitation_to_json(one) for one in found], "total_count": len(found)}
    )


async def invite(request: Request) -> Response:
    organisation, core = await _organisation(request), services(request)
    body = await body_of(request, ("role", "email"))
    made, code = await core.invitations.invite(
        organisation.id, body.text("role"), body.optional("email"), actor_of(request)
    )
    url = link_of(core.settings.public_url, code)
    answer = {"invitation": invitation_to_json(made), "organisation": organisation.name, "url": url}
    return ApiResponse(answer, status_code=201)


async def revoke_invitation(request: Request) -> Response:
    organisation, ref = await _organisation(request), request.path_params["ref"]
    await services(request).invitations.revoke(organisation.id, ref)
    return ApiResponse({"revoked": ref})


async def people(request: Request) -> Response:
    page = page_of(request)
    found, total = await services(request).people.page(
        removed=flag(request, "removed"), limit=page.limit, offset=page.offset
    )
    return page_response("people", [_person_to_json(one) for one in found], total, page)


async def remove_person(request: Request) -> Response:
    core = services(request)
    person = await core.people.find_named(request.path_params["ref"])
    await core.members.remove_person(person.id)
    return ApiResponse({"removed": person.id, "name": person.name})


def _person_to_json(person: Person) -> Mapping[str, object]:
    return {
        "id": person.id,
        "name": person.name,
        "email": person.email,
        "created_at": person.created_at,
        "removed_at": person.removed_at,
    }


MEMBERS = "/organisations/{organisation}/members"
INVITATIONS = "/organisations/{organisation}/invitations"
OF_ONE: Reach = "organisation"

ROUTES = [
    ScopedRoute(MEMBERS, index, scope="read", reach=OF_ONE),
    ScopedRoute(MEMBERS + "/{ref}", change_role, scope="admin", reach=OF_ONE, methods=["PUT"]),
    ScopedRoute(MEMBERS + "/{ref}", remove, scope="read", reach=OF_ONE, methods=["DELETE"]),
    ScopedRoute(INVITATIONS, invitations, scope="admin", reach=OF_ONE),
    ScopedRoute(INVITATIONS, invite, scope="admin", reach=OF_ONE, methods=["POST"]),
    ScopedRoute(
        INVITATIONS + "/{ref}", revoke_invitation, scope="admin", reach=OF_ONE, methods=["DELETE"]
    ),
    ScopedRoute("/people", people, scope="admin", reach="installation"),
    ScopedRoute(
        "/people/{ref}", remove_person, scope="admin", reach="installation", methods=["DELETE"]
    ),
]
