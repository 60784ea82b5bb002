"""Where the members of a workspace let alerts about its runs go. Addresses and secrets are sealed,
because the path of a webhook is often a secret, too."""

import base64
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

from infra.http.checked_addresses import CheckedDialling
from infra.identity.secrets.sealed import Sealer
from infra.names import workspace_name
from infra.settings.alerts import ALERT_KINDS, is_webhook
from infra.spine.postgres.pool import Database, Row
from infra.spine.postgres.queries import queries
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound, RepositoryAway

SQL = queries("infra/operations/maintenance/alerts.sql")

MOST_TARGETS = 20
"""How many targets a workspace may have."""

SECRET_BYTES = 32
ATOM = r"[A-Za-z0-9!#$%&'*+/=^_`{|}~-]+"
ADDRESS = re.compile(rf"(?=.{{1,64}}@.{{1,190}}$){ATOM}(\.{ATOM})*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")
"""Addresses whose text means itself in a mail: no comments, groups, quotes or encoded words."""
ADVICE = "use a public address, or let the operator allow it with HEADRACE_GIT_ALLOW"
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class AlertTarget:
    """A target without its secret. `shown` is its mail address or the host of its webhook, and `error`
    says why the last alert was not delivered to it."""

    id: str
    medium: str
    shown: str
    kinds: Sequence[str]
    created_by: str
    created_at: datetime
    error: str | None


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """Where an alert is sent: its address, and the secret that signs it (None for mail)."""

    medium: str
    address: str
    secret: str | None


def new_secret() -> str:
    """A secret that signs, in the form of Standard Webhooks."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


class AlertTargets:
    """The targets of workspaces, in the table `alert_targets`."""

    def __init__(
        self, database: Database, sealer: Sealer, dialling: CheckedDialling, *, sends_mail: bool
    ) -> None:
        self._pool = database.durable
        self._sealer = sealer
        self._dialling = dialling
        self._sends_mail = sends_mail

    async def add(
        self, workspace: str, medium: str, address: str, *, kinds: Sequence[str], by: str
    ) -> tuple[AlertTarget, str | None]:
        """Add a target. Returns it with the secret of a webhook, which is not shown again. Raises
        InvalidConfig, and Conflict when there are too many."""
        unknown = [kind for kind in kinds if kind not in ALERT_KINDS]
        if unknown or not kinds:
            got = f", got {unknown[0][:40]!r}" if unknown else ""
            raise _wrong("kinds", f"must be some of {', '.join(ALERT_KINDS)}{got}")
        shown = await self._check(medium, address)
        target, secret = f"at-{secrets.token_hex(8)}", None
        sealed_secret = None
        if medium == "webhook":
            secret = new_secret()
            sealed_secret = await self._seal(workspace, target, "secret", secret)
        sealed = await self._seal(workspace, target, "address", address)
        async with self._pool.take_turns(f"alert targets of {workspace}") as connection:
            row = await connection.fetchrow(
                SQL["add_target"],
                target,
                workspace,
                medium,
                shown,
                sealed,
                sealed_secret,
                sorted(set(kinds)),
                by,
                MOST_TARGETS,
            )
        if row is None:
            raise Conflict(
                f"a workspace has at most {MOST_TARGETS} targets of alerts; remove one that nobody reads"
            )
        return _target(row), secret

    async def of_workspace(self, workspace: str) -> Sequence[AlertTarget]:
        """The targets of a workspace, the oldest first."""
        return [_target(row) for row in await self._pool.fetch(SQL["targets_of"], workspace)]

    async def remove(self, workspace: str, target: str) -> None:
        """Remove a target, with what it has not been told yet. Raises NotFound."""
        if await self._pool.fetchval(SQL["remove_target"], workspace, target) is None:
            raise await self._absent(workspace, target)

    async def rotate(self, workspace: str, target: str) -> str:
        """Give a webhook another secret, which signs from now on. Returns it. Raises NotFound."""
        secret = new_secret()
        sealed = await self._seal(workspace, target, "secret", secret)
        if await self._pool.fetchval(SQL["rotate_target"], workspace, target, sealed) is None:
            raise await self._absent(workspace, target)
        return secret

    async def open(self, target: str) -> OpenTarget | None:
        """Where alerts for a target go; None when it was removed. Raises InvalidConfig without the key
        that sealed it."""
        row = await self._pool.fetchrow(SQL["open_target"], target)
        if row is None:
            return None
        owner, secret = row["workspace"], None
        if row["secret"] is not None:
            secret = await self._sealer.open(
                row["secret"], owner=owner, field=_field(target, "secret")
            )
        address = await self._sealer.open(
            row["address"], owner=owner, field=_field(target, "address")
        )
        return OpenTarget(row["medium"], address, secret)

    async def note(self, target: str, error: str | None) -> None:
        """Record whether the last alert was delivered."""
        await self._pool.execute(SQL["note_target"], target, error)

    async def rewrap(self) -> int:
        """Wrap the data keys of all sealed values with the current key. Returns their number."""
        done = 0
        for row in await self._pool.fetch(SQL["sealed_targets"]):
            values: Mapping[str, bytes] = {
                name: row[name] for name in ("address", "secret") if row[name] is not None
            }
            fresh = {
                name: await self._sealer.rewrap(
                    sealed, owner=row["workspace"], field=_field(row["id"], name)
                )
                for name, sealed in values.items()
            }
            await self._pool.execute(
                SQL["rewrap_target"],
                row["id"],
                row["address"],
                row["secret"],
                fresh["address"],
                fresh.get("secret"),
            )
            done += len(fresh)
        return done

    async def _check(self, medium: str, address: str) -> str:
        """The part of an address that lists show. Raises InvalidConfig when nothing may go there."""
        if medium == "mail":
            if not ADDRESS.fullmatch(address):
                raise _wrong("address", "must be a mail address such as ada@example.org")
            if not self._sends_mail:
                raise _wrong(
                    "address",
                    "cannot get mail, because HEADRACE_SMTP_URL is not set; use a webhook",
                )
            return address
        if medium != "webhook":
            raise _wrong("medium", "must be webhook or mail")
        if not is_webhook(address):
            raise _wrong("address", "must be an address such as https://hooks.example.org/x")
        parts = urlsplit(address)
        host = parts.hostname or ""
        try:
            await self._dialling.addresses(host, parts.port or PORTS[parts.scheme])
        except RepositoryAway as error:
            why = str(error).partition(";")[0]
            raise _wrong(
                "address",
                f"is not reachable, so no target was stored: {why}; correct it, or add it again when "
                "the name resolves",
            ) from error
        return host

    async def _absent(self, workspace: str, target: str) -> NotFound:
        name = await workspace_name(self._pool, workspace)
        return NotFound(
            f"the workspace {name} has no target {target[:40]!r} of alerts with a secret or address to "
            f"change; `headrace workspace alerts {name}` shows all"
        )

    async def _seal(self, workspace: str, target: str, name: str, value: str) -> bytes:
        return await self._sealer.seal(value, owner=workspace, field=_field(target, name))


def _field(target: str, name: str) -> str:
    return f"{name} of {target}"


def _wrong(key: str, message: str) -> InvalidConfig:
    return InvalidConfig(f"{key} {message}", issues=(Issue(key, message),))


def _target(row: Row) -> AlertTarget:
    return AlertTarget(
        id=row["id"],
        medium=row["medium"],
        shown=row["shown"],
        kinds=tuple(row["kinds"]),
        created_by=row["created_by"],
        created_at=row["created_at"],
        error=row["error"],
    )
