"""Creating, rotating and revoking API keys. Nobody gets more rights than their own key
has."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from infra.identity.api_key_format import IssuedApiKey, is_api_key_id
from infra.identity.api_keys import ApiKey, ApiKeyRequest, ApiKeys
from infra.identity.recent_api_keys import RecentApiKeys
from infra.ports.actor import ROOT, SCOPES, Actor, ApiKeyScope
from infra.spine.ports.clock import Clock
from schemas.errors import InvalidConfig, Issue, Refused

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
"""The form of the names of API keys and of owners."""

ALLOWED = "letters, digits, '.', '_' and '-', at most 63"
LONGEST_S = 10 * 365 * 24 * 3600
LIFETIME_S = 365 * 24 * 3600.0
"""How long an API key is valid when nobody says for how long."""

NEVER = math.inf
"""The lifetime of an API key that does not expire."""

OVERLAP_S = 3600.0
"""How long the old secret of a rotated API key stays valid when nobody says for how long."""

LONGEST_OVERLAP_S = 30 * 24 * 3600


class BeyondRights(Refused):
    """The sender asks for something that its own API key does not allow."""

    code = "FORBIDDEN"
    status = 403


@dataclass(frozen=True, slots=True)
class WantedApiKey:
    """The content of an API key that a user asks for. `workspace` and `organisation` are ids: a key of a
    workspace is also one of the workspace's organisation. `expires_s` is NEVER
    for a key that does not expire, and None for the usual lifetime."""

    name: str
    scopes: Sequence[str]
    owner: str | None = None
    workspace: str | None = None
    expires_s: float | None = None
    organisation: str | None = None


class ApiKeyIssuer:
    """Creates, rotates and revokes API keys on behalf of an actor."""

    def __init__(self, api_keys: ApiKeys, recent: RecentApiKeys, clock: Clock) -> None:
        self._api_keys = api_keys
        self._recent = recent
        self._clock = clock

    async def create(self, wanted: WantedApiKey, creator: Actor) -> tuple[ApiKey, IssuedApiKey]:
        """Make an API key. Raises InvalidConfig, Conflict, and BeyondRights when the key would have
        rights that its creator does not have."""
        _check_name("name", wanted.name)
        scopes = _scopes_of(wanted.scopes)
        for scope in sorted(scopes):
            if not creator.may(scope):
                raise BeyondRights(
                    f"the scope {scope} is beyond the rights of your API key, which has "
                    f"{', '.join(sorted(creator.scopes))}; leave it out"
                )
        workspace = wanted.workspace or creator.workspace
        if creator.workspace is not None and workspace != creator.workspace:
            raise BeyondRights("your API key is for another workspace; leave the workspace out")
        organisation = wanted.organisation or creator.organisation
        if creator.organisation is not None and organisation != creator.organisation:
            raise BeyondRights(
                "your API key is for another organisation; leave the organisation out"
            )
        if not (workspace is None or creator.visible is None or workspace in creator.visible):
            raise BeyondRights("your API key is for other workspaces; leave the workspace out")
        if (workspace or organisation) is not None and "metrics" in scopes:
            message = (
                "metrics are about all workspaces; make an API key without a workspace or an "
                "organisation for them"
            )
            raise InvalidConfig(message, issues=(Issue("scopes", message),))
        request = ApiKeyRequest(
            name=wanted.name,
            owner=_owner_of(wanted, creator),
            scopes=scopes,
            workspace=workspace,
            expires_at=_expiry_of(
                wanted.expires_s, LIFETIME_S, self._clock.now(), creator.expires_at
            ),
            created_by=creator.name,
            organisation=organisation,
            person=creator.person_id,
        )
        made = await self._api_keys.create(request)
        self._recent.forget()
        return made

    async def rotate(
        self, ref: str, rotator: Actor, *, overlap_s: float, expires_s: float | None
    ) -> tuple[ApiKey, IssuedApiKey]:
        """Give an API key (its id, prefix or name) a new secret. The old one stays valid for
        `overlap_s` seconds. The new one lives as long as the old one did, unless `expires_s` says
        otherwise. Raises NotFound, Conflict, and BeyondRights as `create` does."""
        found = await self._api_keys.find(
            ref, workspace=rotator.workspace, organisation=rotator.organisation
        )
        if rotator.is_confined and found.owner != rotator.owner:
            raise BeyondRights(
                f"the API key {found.name} belongs to {found.owner}, and yours is bound to "
                f"{_binding(rotator)}; ask {found.owner} to rotate it, or revoke it"
            )
        if found.id == rotator.api_key and found.expires_at != rotator.expires_at:
            raise BeyondRights(
                f"this secret of the API key {found.name} was replaced; rotate it with the new one"
            )
        expires_at = _expiry_of(
            expires_s, _lifetime_s(found), self._clock.now(), rotator.expires_at
        )
        rotated = await self._api_keys.rotate(found, overlap_s=overlap_s, expires_at=expires_at)
        self._recent.forget()
        return rotated

    async def revoke(self, ref: str, revoker: Actor) -> ApiKey:
        """Revoke an API key by id, prefix or name. Raises NotFound, and Conflict when several keys
        have the name."""
        revoked = await self._api_keys.revoke(
            ref, workspace=revoker.workspace, organisation=revoker.organisation
        )
        self._recent.forget()
        return revoked

    async def revoke_own(self, revoker: Actor) -> ApiKey:
        """Revoke the API key of a request, which needs no scope. Raises BeyondRights for a key that
        is a setting and not a row."""
        if not is_api_key_id(revoker.api_key):
            raise BeyondRights(
                f"the API key {revoker.api_key} is a setting of the installation and cannot be "
                "revoked; change the setting instead"
            )
        return await self.revoke(revoker.api_key, revoker)


def _expiry_of(
    wanted_s: float | None, usual_s: float, now: datetime, last: datetime | None
) -> datetime | None:
    """When a new secret expires: after `wanted_s`, or else after the usual lifetime, and never later
    than the secret that the sender sent (`last`). Raises BeyondRights when a later expiry was asked
    for."""
    lifetime_s = usual_s if wanted_s is None else wanted_s
    expires_at = None if lifetime_s == NEVER else now + timedelta(seconds=lifetime_s)
    if wanted_s is None:
        return min(filter(None, (expires_at, last)), default=None)
    if last is not None and (expires_at is None or expires_at > last):
        raise BeyondRights(
            f"your API key expires at {last:%Y-%m-%d %H:%M} UTC; give the new one an earlier expiry"
        )
    return expires_at


def _lifetime_s(api_key: ApiKey) -> float:
    """How long the secret of an API key was made to live."""
    if api_key.expires_at is None:
        return NEVER
    return (api_key.expires_at - (api_key.rotated_at or api_key.created_at)).total_seconds()


def _owner_of(wanted: WantedApiKey, creator: Actor) -> str:
    """The owner of the new API key. An owner has secrets of its own, so only a key of all
    workspaces may name another one. A key that is bound to a workspace or an organisation never
    reaches them (`Actor.person`)."""
    owner = wanted.owner or creator.owner
    _check_name("owner", owner)
    if owner != creator.owner and creator.is_confined:
        raise BeyondRights(
            f"the owner must be {creator.owner}, because your API key is bound to {_binding(creator)}"
        )
    if owner == ROOT:
        raise InvalidConfig(f"{ROOT} is not an owner; choose another name")
    return owner


def _binding(actor: Actor) -> str:
    """The binding of an API key, as an error names it."""
    return "a workspace" if actor.workspace is not None else "an organisation"


def _scopes_of(names: Sequence[str]) -> frozenset[ApiKeyScope]:
    found = frozenset(scope for scope in SCOPES if scope in names)
    unknown = [name for name in names if name not in SCOPES]
    if unknown or not found:
        what = f"{unknown[0]!r} is not a scope" if unknown else "an API key needs a scope"
        message = f"{what}; choose from {', '.join(SCOPES)}"
        raise InvalidConfig(message, issues=(Issue("scopes", message),))
    return found


def _check_name(key: str, value: str) -> None:
    if not NAME.fullmatch(value):
        message = f"{value[:70]!r} cannot be the {key} of an API key; use {ALLOWED}"
        raise InvalidConfig(message, issues=(Issue(key, message),))
