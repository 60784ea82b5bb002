"""Secrets as people manage them: set, list and delete, and wrap all of them with a new key.

A secret belongs to a workspace, or to the person who sets it. No function here returns a value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.identity.issuing import BeyondRights
from infra.identity.secrets.sealed import Sealer
from infra.identity.secrets.store import PostgresSecrets
from infra.operations.maintenance.alert_targets import AlertTargets
from infra.ports.actor import key_workspace
from infra.ports.secrets import SecretOwner, StoredSecret
from infra.repositories.forge_connections import ForgeConnections
from producers.core.workspaces import Workspace, Workspaces
from schemas.errors import InvalidConfig, Issue, NotFound
from schemas.secrets.rules import SCOPES, SecretScope, check_secret_name, check_secret_value
from schemas.secrets.secret_value import SecretValue

NO_PERSON = (
    "your API key is bound to a workspace, so it has no personal secrets; set scope workspace, or use "
    "one of your own that is not bound"
)


@dataclass(frozen=True, slots=True)
class OwnedBy:
    """The owner that a request names: the person who sends it (None for an API key that reaches no
    personal secrets), or a workspace (`workspace` is its name or id; without one there must be only
    one workspace)."""

    person: str | None
    scope: SecretScope = "workspace"
    workspace: str | None = None


@dataclass(frozen=True, slots=True)
class Rewrapped:
    """The number of data keys that were wrapped again, and the id of the key that wraps them now."""

    key: str
    secrets: int
    connections: int


class SecretKeeping:
    """Sets, lists and deletes secrets for the API."""

    def __init__(
        self,
        store: PostgresSecrets,
        workspaces: Workspaces,
        *,
        connections: ForgeConnections,
        targets: AlertTargets,
        sealer: Sealer,
    ) -> None:
        self._store = store
        self._workspaces = workspaces
        self._connections = connections
        self._targets = targets
        self._sealer = sealer

    async def put_secret(
        self, by: OwnedBy, name: str, value: SecretValue, *, author: str
    ) -> tuple[StoredSecret, bool]:
        """Store a secret, and return it without its value, and whether it is new. `author` is the
        owner and the API key that lists show. Raises InvalidConfig and NotFound, also when the
        name, the value or the workspace is not allowed, and BeyondRights for a personal secret of
        nobody."""
        check_secret_name(name)
        check_secret_value(value.reveal())
        owner = await self._owner(by)
        is_new = await self._store.put_secret(owner, name, value, by=author)
        found = next(one for one in await self._store.all_secrets([owner]) if one.name == name)
        return found, is_new

    async def delete(self, by: OwnedBy, name: str) -> SecretOwner:
        """Delete a secret, and return its owner. Raises NotFound, and BeyondRights for a personal secret
        of nobody."""
        owner = await self._owner(by)
        if not await self._store.delete(owner, name):
            raise NotFound(
                f"there is no {owner.scope} secret {name[:80]!r}; `headrace secret list` shows all"
            )
        return owner

    async def all_secrets(
        self, person: str | None, workspace: str | None
    ) -> tuple[Sequence[StoredSecret], Mapping[str, str]]:
        """Return the personal secrets of a person (none without one) and those of a workspace (of all
        workspaces without one), and the names of these workspaces by id. Raises NotFound."""
        return await self.secrets_of(person, await self._workspaces_of(workspace))

    async def secrets_of(
        self, person: str | None, workspaces: Sequence[Workspace]
    ) -> tuple[Sequence[StoredSecret], Mapping[str, str]]:
        """As `all_secrets`, for workspaces that were found."""
        owners = [SecretOwner("personal", person)] if person is not None else []
        owners += [SecretOwner("workspace", one.id) for one in workspaces]
        return await self._store.all_secrets(owners), {str(one.id): one.name for one in workspaces}

    async def rewrap(self) -> Rewrapped:
        """Wrap the data keys of all sealed values with the current key. Raises InvalidConfig when one
        does not open."""
        connections = await self._connections.rewrap() + await self._targets.rewrap()
        done = await self._store.rewrap()
        return Rewrapped(await self._sealer.key_id(), done, connections)

    async def _workspaces_of(self, ref: str | None) -> Sequence[Workspace]:
        if ref is None and key_workspace() is None:
            return await self._workspaces.visible()
        return [await self._choose(ref)]

    async def _choose(self, ref: str | None) -> Workspace:
        """The workspace that is named, or the only one that the API key may see. Raises NotFound
        for any other one."""
        return await self._workspaces.choose(ref or key_workspace())

    async def _owner(self, by: OwnedBy) -> SecretOwner:
        if by.scope == "personal":
            if by.workspace is not None:
                message = (
                    "has no meaning for a personal secret; leave it out, or set scope workspace"
                )
                raise InvalidConfig(f"workspace {message}", issues=(Issue("workspace", message),))
            if by.person is None:
                raise BeyondRights(NO_PERSON)
            return SecretOwner("personal", by.person)
        return SecretOwner("workspace", (await self._choose(by.workspace)).id)


def parse_secret_scope(text: str | None) -> SecretScope:
    """Return the scope that a request names; workspace without one. Raises InvalidConfig."""
    for scope in SCOPES:
        if text == scope:
            return scope
    if text is None:
        return "workspace"
    message = f"must be {' or '.join(SCOPES)}, got {text[:40]!r}"
    raise InvalidConfig(f"scope {message}", issues=(Issue("scope", message),))
