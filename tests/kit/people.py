"""People of an organisation, each with an API key."""

from dataclasses import dataclass
from datetime import datetime

from infra.identity.api_keys import ApiKeyRequest
from infra.ports.actor import MAIN, ROLE_SCOPES, ApiKeyScope, Role
from tests.kit.application import Application


@dataclass(frozen=True)
class SignedUp:
    """A person (an id), and the text of an API key of theirs."""

    id: str
    email: str
    api_key: str


async def member(
    app: Application,
    name: str,
    role: Role,
    *,
    organisation: str = MAIN,
    scopes: frozenset[ApiKeyScope] | None = None,
    expires_at: datetime | None = None,
) -> SignedUp:
    """A new person with this role, and an API key of all that the role allows, or of `scopes`."""
    person = await app.services.people.add(name, f"{name}@example.org", created_by="test")
    await app.services.members.add(organisation, person.id, role, created_by="test")
    return SignedUp(
        person.id,
        person.email,
        await key_of(
            app,
            person.id,
            f"{name}-key",
            organisation=organisation,
            scopes=scopes or ROLE_SCOPES[role],
            expires_at=expires_at,
        ),
    )


async def key_of(
    app: Application,
    person: str,
    name: str,
    *,
    organisation: str = MAIN,
    scopes: frozenset[ApiKeyScope] = frozenset({"admin"}),
    expires_at: datetime | None = None,
) -> str:
    """The text of a new API key of a person."""
    request = ApiKeyRequest(
        name=name,
        owner=person,
        scopes=scopes,
        workspace=None,
        expires_at=expires_at,
        created_by="test",
        organisation=organisation,
        person=person,
    )
    _, issued = await app.services.api_keys.create(request)
    app.services.recent_api_keys.forget()
    return issued.text
