"""The limits of quotas: what the operator lets each organisation, workspace and API key use, and what an
owner of an organisation lets each of its workspaces use within that."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from infra.identity.api_key_format import is_api_key_id
from infra.ports.actor import Actor
from infra.settings.quotas import KEY_QUOTAS, ORGANISATION_QUOTAS, QUOTAS, SAMPLES
from infra.spine.ports.clock import Clock
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import InvalidConfig, Issue

SQL = queries("infra/identity/quotas.sql")

KEPT_S = 2.0
"""How long a process remembers how many requests may be sent."""

SET = {
    "organisation": SQL["set_limit_of_organisation"],
    "workspace": SQL["set_limit_of_workspace"],
}
UNSET = {
    "organisation": SQL["unset_limit_of_organisation"],
    "workspace": SQL["unset_limit_of_workspace"],
}

DEFAULT = "default"
"""The text of a limit that is the operator's."""

REQUESTS = "requests_per_minute"

Kind = Literal["organisation", "workspace", "API key"]


@dataclass(frozen=True, slots=True)
class QuotaHolder:
    """An organisation, a workspace or an API key, by its id."""

    kind: Kind
    id: str

    @property
    def organisation(self) -> str | None:
        return self.id if self.kind == "organisation" else None

    @property
    def workspace(self) -> str | None:
        return self.id if self.kind == "workspace" else None

    @property
    def key(self) -> str | None:
        return self.id if self.kind == "API key" else None

    def __str__(self) -> str:
        """The name under which the database counts."""
        return f"{self.kind}/{self.id}"


@dataclass(frozen=True, slots=True)
class QuotaLimit:
    """How much of a quota may be used (None: without a limit), and whether an owner of the organisation
    said so and not the operator."""

    most: int | None = None
    is_owners: bool = False


NO_LIMIT = QuotaLimit()

NAMES: Mapping[Kind, Iterable[str]] = {
    "organisation": tuple(ORGANISATION_QUOTAS),
    "workspace": tuple(QUOTAS),
    "API key": KEY_QUOTAS,
}
"""The quotas of each kind of holder."""


def holders_of(
    actor: Actor | None, workspace: str | None = None, organisation: str | None = None
) -> list[QuotaHolder]:
    """The holders for which something of an actor counts: an organisation and a workspace, or else those
    that its API key is bound to, and that key. The keys of the settings have no quotas."""
    if actor is not None:
        organisation = organisation or actor.organisation
        workspace = workspace or actor.workspace
    found = [] if organisation is None else [QuotaHolder("organisation", organisation)]
    if workspace is not None:
        found.append(QuotaHolder("workspace", workspace))
    if actor is not None and is_api_key_id(actor.api_key):
        found.append(QuotaHolder("API key", actor.api_key))
    return found


class QuotaLimits:
    """Reads and sets limits. The defaults are those of the settings."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        per_workspace: Mapping[str, int],
        per_key: Mapping[str, int],
        per_organisation: Mapping[str, int],
    ) -> None:
        self._database = database
        self._clock = clock
        self._defaults: Mapping[Kind, Mapping[str, int]] = {
            "organisation": per_organisation,
            "workspace": per_workspace,
            "API key": per_key,
        }
        self._of_requests: Mapping[QuotaHolder, list[QuotaLimit]] = {}
        self._read_at = float("-inf")

    async def of_holder(self, connection: Any, holder: QuotaHolder) -> dict[str, QuotaLimit]:
        """The limit of each quota of a holder."""
        rows: dict[str, list[QuotaLimit]] = {}
        if holder.key is None:
            for row in await connection.fetch(
                SQL["limits_of"], holder.workspace, holder.organisation
            ):
                rows.setdefault(row["name"], []).append(QuotaLimit(row["most"], row["is_owners"]))
        return {
            name: self._effective(holder, name, rows.get(name, ())) for name in NAMES[holder.kind]
        }

    async def of_requests(self, holder: QuotaHolder) -> QuotaLimit:
        """How many requests a holder may send in a minute, as it was at most KEPT_S ago."""
        now = self._clock.elapsed_s()
        if now - self._read_at >= KEPT_S:
            self._read_at = now
            found: dict[QuotaHolder, list[QuotaLimit]] = {}
            for row in await self._database.lazy.fetch(SQL["request_limits"]):
                limit = QuotaLimit(row["most"], row["is_owners"])
                found.setdefault(QuotaHolder(row["kind"], row["id"]), []).append(limit)
            self._of_requests = found
        return self._effective(holder, REQUESTS, self._of_requests.get(holder, ()))

    async def set_of_organisation(self, organisation: str, limits: Mapping[str, str]) -> None:
        """Let an organisation use this much of each of these quotas: a number, `unlimited`, or `default`
        for the operator's setting. Raises InvalidConfig, and then no limit is changed."""
        await self._set("organisation", organisation, limits)

    async def set_of_workspace(self, workspace: str, limits: Mapping[str, str]) -> None:
        """The same for a workspace."""
        await self._set("workspace", workspace, limits)

    async def set_by_owner(
        self, workspace: str, organisation: str, limits: Mapping[str, str]
    ) -> None:
        """Let a workspace use at most this much, within what the operator allows: a number, or
        `unlimited` or `default` for all that. Raises InvalidConfig, also for a number that is larger
        than the operator's limit for the workspace or for its organisation, and then no limit is
        changed."""
        wanted = {name: _limit_in("workspace", name, text) for name, text in limits.items()}
        async with self._database.durable.acquire() as connection, connection.transaction():
            ceilings = await self._ceilings(connection, workspace, organisation)
            for name, most in sorted(wanted.items()):
                if name == SAMPLES:
                    raise _bad(name, "is set by the operator of the installation alone")
                ceiling = ceilings.get(name)
                if most is not None and ceiling is not None and most > ceiling:
                    raise _bad(name, f"may be at most {ceiling}, which the operator allows")
                if most is None:
                    await connection.execute(SQL["unset_owners_limit"], workspace, name)
                else:
                    await connection.execute(SQL["set_owners_limit"], workspace, name, most)
        self._read_at = float("-inf")

    async def _ceilings(
        self, connection: Any, workspace: str, organisation: str
    ) -> dict[str, int | None]:
        """The operator's limits of a workspace: the lower one of its own and its organisation's."""
        found: dict[str, int | None] = {}
        for holder in (
            QuotaHolder("workspace", workspace),
            QuotaHolder("organisation", organisation),
        ):
            rows = await connection.fetch(SQL["limits_of"], holder.workspace, holder.organisation)
            set_ = {row["name"]: row["most"] for row in rows if not row["is_owners"]}
            for name in NAMES[holder.kind]:
                most = set_[name] if name in set_ else self._defaults[holder.kind].get(name)
                found[name] = _lower(found.get(name), most)
        return found

    async def _set(self, kind: Kind, identity: str, limits: Mapping[str, str]) -> None:
        wanted = {name: _limit_in(kind, name, text) for name, text in limits.items()}
        async with self._database.durable.acquire() as connection, connection.transaction():
            for name in sorted(wanted):
                if limits[name] == DEFAULT:
                    await connection.execute(UNSET[kind], identity, name)
                else:
                    await connection.execute(SET[kind], identity, name, wanted[name])
        self._read_at = float("-inf")

    def _effective(self, holder: QuotaHolder, name: str, rows: Iterable[QuotaLimit]) -> QuotaLimit:
        """The lower limit of the operator's, which is that of the settings without a row, and the
        owner's."""
        operators = QuotaLimit(self._defaults[holder.kind].get(name))
        owners = NO_LIMIT
        for row in rows:
            if row.is_owners:
                owners = row
            else:
                operators = row
        if owners.most is None or (operators.most is not None and operators.most <= owners.most):
            return operators
        return owners


def _lower(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _limit_in(kind: Kind, name: str, text: str) -> int | None:
    """The limit that a text means; None for none of its own. Raises InvalidConfig."""
    if name not in NAMES[kind]:
        message = f"{name[:40]!r} is not a quota; choose from {', '.join(NAMES[kind])}"
        raise InvalidConfig(message, issues=(Issue(name[:40], message),))
    if text in ("unlimited", DEFAULT):
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise _bad(name, f"must be a whole number, unlimited or default, got {text[:40]!r}")
    return int(text)


def _bad(name: str, message: str) -> InvalidConfig:
    return InvalidConfig(f"{name} {message}", issues=(Issue(name, message),))
