"""Quotas of workspaces and of API keys: how much each may use, and how much it has used.

All counts are in the database, so they hold for all control processes together. Runs are admitted
under a lock of their workspace and key, and counters are raised by one statement that does not pass
the limit. A day and a minute are those of UTC by the clock of the database.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from infra.identity.api_key_format import is_api_key_id
from infra.names import workspace_name
from infra.ports.actor import Actor, acting
from infra.settings.quotas import KEY_QUOTAS, QUOTAS, SAMPLES
from infra.spine.ports.clock import Clock
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import InvalidConfig, Issue, QuotaExceeded

SQL = queries("infra/identity/quotas.sql")

KEPT_S = 2.0
"""How long a process remembers how many requests workspaces may send."""

ASK_AGAIN_S = 60.0
"""When to ask again for a place that frees when a run ends."""

BLOCK_BYTES = 4 << 20
"""An upload whose length is not known is counted in blocks."""

WINDOWS: Mapping[str, str] = {
    "runs_per_day": "day",
    "requests_per_minute": "minute",
    "upload_bytes_per_day": "day",
}
"""The quotas that are free again when the next day or minute begins."""

DEFAULT = "default"
"""The text of a limit that is the operator's."""

Kind = Literal["workspace", "API key"]


@dataclass(frozen=True, slots=True)
class QuotaHolder:
    """A workspace or an API key, by its id."""

    kind: Kind
    id: str

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
class QuotaState:
    """A quota of a holder. `most` is None without a limit, and `frees_at` when a day or minute frees
    nothing."""

    holder: Kind
    name: str
    most: int | None
    used: int
    frees_at: datetime | None


def holders_of(actor: Actor | None, workspace: str | None = None) -> list[QuotaHolder]:
    """The holders for which something of an actor counts: a workspace, or else the one that its API
    key is bound to, and that key. The keys of the settings have no quotas."""
    if actor is not None and workspace is None:
        workspace = actor.workspace
    found = [] if workspace is None else [QuotaHolder("workspace", workspace)]
    if actor is not None and is_api_key_id(actor.api_key):
        found.append(QuotaHolder("API key", actor.api_key))
    return found


class Quotas:
    """Counts what workspaces and API keys use, and refuses what is beyond their limits."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        per_workspace: Mapping[str, int],
        per_key: Mapping[str, int],
    ) -> None:
        self._durable = database.durable
        self._lazy = database.lazy
        self._clock = clock
        self._per_workspace = per_workspace
        self._per_key = per_key
        self._request_limits: Mapping[str, int | None] = {}
        self._request_limits_at = float("-inf")

    async def admit_run(self, run: str, stream: str, *, workspace: str | None) -> None:
        """Count a run or evaluation that is about to be appended for the sender of the request. Doing so
        again changes nothing. Raises QuotaExceeded."""
        actor = acting()
        holders = holders_of(actor, workspace)
        if not holders:
            return
        async with self._durable.acquire() as connection, connection.transaction():
            for holder in holders:
                await connection.execute(SQL["lock_holder"], str(holder))
            if await connection.fetchval(SQL["is_admitted"], run):
                return
            for holder in holders:
                await self._check_runs(connection, holder)
            ids = {holder.kind: holder.id for holder in holders}
            await connection.execute(
                SQL["admit_run"], run, stream, ids.get("workspace"), ids.get("API key")
            )

    async def withdraw_run(self, run: str) -> None:
        """Count a run no longer, because it was not appended."""
        await self._durable.execute(SQL["withdraw_run"], run)

    async def count_request(self, actor: Actor) -> None:
        """Count a request to the API. Raises QuotaExceeded."""
        name = "requests_per_minute"
        limits = await self._request_limits_now()
        wanted = []
        for holder in holders_of(actor):
            default = self._defaults(holder).get(name)
            most = limits.get(holder.id, default) if holder.kind == "workspace" else default
            if most is not None:
                wanted.append((holder, most))
        await self._take(name, 1, wanted)

    async def take_bytes(self, actor: Actor, count: int) -> None:
        """Count bytes of an upload, before they are read. Raises QuotaExceeded."""
        name = "upload_bytes_per_day"
        wanted = []
        for holder in holders_of(actor):
            most = (await self._limits(self._lazy, holder))[name]
            if most is not None:
                wanted.append((holder, most))
        await self._take(name, count, wanted)

    async def show(self, workspace: str, actor: Actor) -> list[QuotaState]:
        """The quotas of a workspace, and those of the actor's API key."""
        return [
            state
            for holder in holders_of(actor, workspace)
            for state in await self._states_of(holder)
        ]

    async def set_limits(self, workspace: str, limits: Mapping[str, str]) -> None:
        """Let a workspace use this much of each of these quotas: a number, `unlimited`, or `default` for
        the operator's setting. Raises InvalidConfig, and then no limit is changed."""
        wanted = {name: _limit_in(name, text) for name, text in limits.items()}
        async with self._durable.acquire() as connection, connection.transaction():
            for name in sorted(wanted):
                if limits[name] == DEFAULT:
                    await connection.execute(SQL["unset_limit"], workspace, name)
                else:
                    await connection.execute(SQL["set_limit"], workspace, name, wanted[name])
        self._request_limits_at = float("-inf")

    def _defaults(self, holder: QuotaHolder) -> Mapping[str, int]:
        return self._per_workspace if holder.kind == "workspace" else self._per_key

    async def _limits(self, connection: Any, holder: QuotaHolder) -> dict[str, int | None]:
        """The limit of each quota of a holder; None without one."""
        names = QUOTAS if holder.kind == "workspace" else KEY_QUOTAS
        found: dict[str, int | None] = {name: self._defaults(holder).get(name) for name in names}
        if holder.workspace is not None:
            rows = await connection.fetch(SQL["limits_of"], holder.workspace)
            found |= {row["name"]: row["most"] for row in rows if row["name"] in QUOTAS}
        return found

    async def _request_limits_now(self) -> Mapping[str, int | None]:
        """How many requests workspaces may send, where an administrator said so."""
        now = self._clock.elapsed_s()
        if now - self._request_limits_at >= KEPT_S:
            self._request_limits_at = now
            rows = await self._lazy.fetch(SQL["request_limits"])
            self._request_limits = {row["workspace"]: row["most"] for row in rows}
        return self._request_limits

    async def _check_runs(self, connection: Any, holder: QuotaHolder) -> None:
        limits = await self._limits(connection, holder)
        await connection.execute(SQL["forget_runs"], holder.workspace, holder.key)
        counts = await connection.fetchrow(SQL["count_runs"], holder.workspace, holder.key)
        for name in ("runs_at_once", "runs_per_day"):
            most = limits[name]
            if most is not None and counts[name] >= most:
                raise await self._refusal_of(connection, holder, name, most)

    async def _take(self, name: str, count: int, wanted: Sequence[tuple[QuotaHolder, int]]) -> None:
        """Add to the counters of some holders, or to none. Raises QuotaExceeded."""
        if not wanted:
            return
        async with self._lazy.acquire() as connection, connection.transaction():
            for holder, most in wanted:
                place = (str(holder), name, WINDOWS[name])
                taken = count <= most and await connection.fetchval(
                    SQL["take"], *place, count, most
                )
                if not taken:
                    raise await self._refusal_of(connection, holder, name, most)

    async def _refusal_of(
        self, connection: Any, holder: QuotaHolder, name: str, most: int
    ) -> QuotaExceeded:
        if window := WINDOWS.get(name):
            end = await connection.fetchrow(SQL["window_end"], window)
            retry_s = float(end["left_s"])
            frees = f"it frees at {end['ends_at']:%Y-%m-%d %H:%M} UTC"
        else:
            frees, retry_s = "it frees when one of them ends", ASK_AGAIN_S
        if most == 0:
            frees = "an administrator set it to 0"
        shown = "WORKSPACE"
        if holder.workspace is not None:
            shown = await workspace_name(connection, holder.workspace)
        return QuotaExceeded(
            f"quota {name}: this {holder.kind} may have {most} {QUOTAS[name]}; {frees}, and "
            f"`headrace workspace quotas {shown}` shows limits and use",
            retry_s=retry_s,
        )

    async def _states_of(self, holder: QuotaHolder) -> list[QuotaState]:
        limits = await self._limits(self._lazy, holder)
        counts = await self._lazy.fetchrow(SQL["count_runs"], holder.workspace, holder.key)
        found = []
        for name, most in limits.items():
            window, used, end = WINDOWS.get(name), counts.get(name), None
            if window is not None:
                end = (await self._lazy.fetchrow(SQL["window_end"], window))["ends_at"]
            if name == SAMPLES:
                used = await self._lazy.fetchval(SQL["count_samples"], holder.workspace)
            if used is None:
                used = await self._lazy.fetchval(SQL["used"], str(holder), name, window) or 0
            found.append(QuotaState(holder.kind, name, most, int(used), end))
        return found


def _limit_in(name: str, text: str) -> int | None:
    """The limit that a text means; None for none of its own. Raises InvalidConfig."""
    if name not in QUOTAS:
        message = f"{name[:40]!r} is not a quota; choose from {', '.join(QUOTAS)}"
        raise InvalidConfig(message, issues=(Issue(name[:40], message),))
    if text in ("unlimited", DEFAULT):
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        message = f"must be a whole number, unlimited or default, got {text[:40]!r}"
        raise InvalidConfig(f"{name} {message}", issues=(Issue(name, message),))
    return int(text)
