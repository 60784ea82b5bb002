"""Quotas of organisations, workspaces and API keys: how much each has used, and what is refused.

All counts are in the database, so they hold for all control processes together. Runs, stored bytes and
deployments are admitted under a lock of their organisation, workspace and key, and counters are raised
by one statement that does not pass the limit. A day and a minute are those of UTC by the clock of the
database. The limits are in `infra/identity/quota_limits.py`.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import uuid4

from infra.identity.quota_limits import (
    REQUESTS,
    Kind,
    QuotaHolder,
    QuotaLimit,
    QuotaLimits,
    holders_of,
)
from infra.names import workspace_name
from infra.ports.actor import Actor, acting, key_workspace, own_organisation
from infra.settings.quotas import BYTES, ORGANISATION_QUOTAS, QUOTAS, SAMPLES
from infra.spine.ports.visible_workspaces import VISIBLE
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import QuotaExceeded

SQL = queries("infra/identity/quotas.sql")

ASK_AGAIN_S = 60.0
"""When to ask again for a place that frees when something ends or is deleted."""

BLOCK_BYTES = 4 << 20
"""An upload whose length is not known is counted in blocks."""

WINDOWS: Mapping[str, str] = {
    "runs_per_day": "day",
    REQUESTS: "minute",
    "upload_bytes_per_day": "day",
}
"""The quotas that are free again when the next day or minute begins."""

FREES: Mapping[str, str] = {
    "runs_at_once": "it frees when one of them ends",
    BYTES: "it frees when a dataset is deleted, or an upload is aborted",
    "deployments": "it frees when one of them is undeployed",
    "members": "it frees when a member is removed",
    "workspaces": "none of them can be removed",
}

NOUNS = {**QUOTAS, **ORGANISATION_QUOTAS}

DEPLOYMENTS = "deployments"
Admitted = Literal["bytes", "deployment"]


@dataclass(frozen=True, slots=True)
class QuotaState:
    """A quota of a holder. `most` is None without a limit, and `frees_at` when a day or minute frees
    nothing. `is_owners` says that an owner of the organisation set the limit."""

    holder: Kind
    name: str
    most: int | None
    used: int
    frees_at: datetime | None
    is_owners: bool = False


class Quotas:
    """Counts what organisations, workspaces and API keys use, and refuses what is beyond limits."""

    def __init__(self, database: Database, limits: QuotaLimits) -> None:
        self._durable = database.durable
        self._lazy = database.lazy
        self.limits = limits

    async def admit_run(self, run: str, stream: str, *, workspace: str | None) -> None:
        """Count a run or evaluation that is about to be appended for the sender of the request. Doing so
        again changes nothing. Raises QuotaExceeded."""
        actor = acting()
        holders = await self._holders(actor, workspace)
        if not holders:
            return
        async with self._admission(holders) as connection:
            if await connection.fetchval(SQL["is_admitted"], run):
                return
            for holder in holders:
                await self._check_runs(connection, holder)
            ids = {holder.kind: holder.id for holder in holders}
            kinds: tuple[Kind, ...] = ("workspace", "API key", "organisation")
            await connection.execute(SQL["admit_run"], run, stream, *(ids.get(k) for k in kinds))

    async def withdraw_run(self, run: str) -> None:
        """Count a run no longer, because it was not appended."""
        await self._durable.execute(SQL["withdraw_run"], run)

    @asynccontextmanager
    async def room_for_bytes(self, size: int, *, upload: str | None = None) -> AsyncIterator[None]:
        """Count bytes for the workspace and the organisation of the sender until the block ends. What it
        has stored by then counts by itself, and so does the `upload` that it has begun. Raises
        QuotaExceeded."""
        workspace, organisation = key_workspace(), own_organisation()
        identity = upload or uuid4().hex
        await self._admit("bytes", BYTES, identity, size, workspace, organisation)
        try:
            yield
        finally:
            await self._durable.execute(SQL["withdraw_amount"], "bytes", identity)

    async def admit_deployment(self, name: str, *, workspace: str | None) -> None:
        """Count a deployment that is about to be requested. One that is active already counts once.
        Raises QuotaExceeded."""
        organisation = await self._organisation_of(workspace)
        identity = f"{workspace or ''}/{name}"
        await self._admit("deployment", DEPLOYMENTS, identity, 1, workspace, organisation)

    async def withdraw_deployment(self, name: str, *, workspace: str | None) -> None:
        """Count a deployment no longer, because it was not requested."""
        identity = f"{workspace or ''}/{name}"
        await self._durable.execute(SQL["withdraw_amount"], "deployment", identity)

    async def check_members(self, connection: Any, organisation: str) -> None:
        """Check that an organisation may have one more member, in a transaction that has locked it.
        Raises QuotaExceeded."""
        await self._check_amount(
            connection, QuotaHolder("organisation", organisation), "members", 1
        )

    async def check_workspaces(self, connection: Any, organisation: str) -> None:
        """The same for one more workspace."""
        holder = QuotaHolder("organisation", organisation)
        await self._check_amount(connection, holder, "workspaces", 1)

    async def count_request(self, actor: Actor) -> None:
        """Count a request to the API. Raises QuotaExceeded."""
        wanted = []
        for holder in holders_of(actor):
            limit = await self.limits.of_requests(holder)
            if limit.most is not None:
                wanted.append((holder, limit))
        await self._take(REQUESTS, 1, wanted)

    async def take_bytes(self, actor: Actor, count: int) -> None:
        """Count bytes of an upload, before they are read. Raises QuotaExceeded."""
        name = "upload_bytes_per_day"
        wanted = []
        for holder in holders_of(actor):
            limit = (await self.limits.of_holder(self._lazy, holder))[name]
            if limit.most is not None:
                wanted.append((holder, limit))
        await self._take(name, count, wanted)

    async def show(self, workspace: str, actor: Actor) -> list[QuotaState]:
        """The quotas of a workspace, and those of the actor's API key."""
        return [
            state
            for holder in holders_of(actor, workspace)
            if holder.organisation is None
            for state in await self._states_of(holder)
        ]

    async def show_organisation(self, organisation: str) -> list[QuotaState]:
        """The quotas of an organisation."""
        return await self._states_of(QuotaHolder("organisation", organisation))

    async def _holders(self, actor: Actor | None, workspace: str | None) -> list[QuotaHolder]:
        """The holders for which a run counts. That of no workspace and no organisation counts for its
        API key alone."""
        workspace = workspace or (actor.workspace if actor is not None else None)
        organisation = await self._organisation_of(workspace) if workspace is not None else None
        return holders_of(actor, workspace, organisation)

    async def _organisation_of(self, workspace: str | None) -> str:
        if workspace is None:
            return own_organisation()
        return str(await self._durable.fetchval(SQL["home"], workspace))

    @asynccontextmanager
    async def _admission(self, holders: Sequence[QuotaHolder]) -> AsyncIterator[Any]:
        """A transaction that admits something for these holders, one at a time for each. It counts what
        others of them use, too."""
        with _seeing_all():
            async with self._durable.acquire() as connection, connection.transaction():
                for holder in holders:
                    await connection.execute(SQL["lock_holder"], str(holder))
                yield connection

    async def _admit(
        self,
        kind: Admitted,
        name: str,
        identity: str,
        amount: int,
        workspace: str | None,
        organisation: str,
    ) -> None:
        """Admit an amount for a workspace and an organisation. Raises QuotaExceeded."""
        holders = [QuotaHolder("organisation", organisation)]
        if workspace is not None:
            holders.append(QuotaHolder("workspace", workspace))
        async with self._admission(holders) as connection:
            for holder in holders:
                await self._check_amount(connection, holder, name, amount, identity)
            await connection.execute(SQL["forget_amounts"])
            await connection.execute(
                SQL["admit_amount"], kind, identity, organisation, workspace, amount
            )

    async def _check_amount(
        self, connection: Any, holder: QuotaHolder, name: str, amount: int, identity: str = ""
    ) -> None:
        limit = (await self.limits.of_holder(connection, holder))[name]
        if limit.most is None:
            return
        used = await self._count(connection, holder, name, identity)
        if used + amount > limit.most:
            raise await self._refusal_of(connection, holder, name, limit, used, wanted=amount)

    async def _check_runs(self, connection: Any, holder: QuotaHolder) -> None:
        limits = await self.limits.of_holder(connection, holder)
        place = (holder.workspace, holder.key, holder.organisation)
        await connection.execute(SQL["forget_runs"], *place)
        counts = await connection.fetchrow(SQL["count_runs"], *place)
        for name in ("runs_at_once", "runs_per_day"):
            limit, used = limits[name], counts[name]
            if limit.most is not None and used >= limit.most:
                raise await self._refusal_of(connection, holder, name, limit, used)

    async def _take(
        self, name: str, count: int, wanted: Sequence[tuple[QuotaHolder, QuotaLimit]]
    ) -> None:
        """Add to the counters of some holders, or to none. Raises QuotaExceeded."""
        if not wanted:
            return
        async with self._lazy.acquire() as connection, connection.transaction():
            for holder, limit in wanted:
                place = (str(holder), name, WINDOWS[name])
                taken = count <= (limit.most or 0) and await connection.fetchval(
                    SQL["take"], *place, count, limit.most
                )
                if not taken:
                    used = await connection.fetchval(SQL["used"], *place) or 0
                    raise await self._refusal_of(
                        connection, holder, name, limit, used, wanted=count
                    )

    async def _refusal_of(
        self,
        connection: Any,
        holder: QuotaHolder,
        name: str,
        limit: QuotaLimit,
        used: int,
        *,
        wanted: int = 1,
    ) -> QuotaExceeded:
        retry_s = ASK_AGAIN_S
        if window := WINDOWS.get(name):
            end = await connection.fetchrow(SQL["window_end"], window)
            retry_s = float(end["left_s"])
            frees = f"it frees at {end['ends_at']:%Y-%m-%d %H:%M} UTC"
        else:
            frees = FREES[name]
        if limit.most == 0:
            frees = f"{'an owner' if limit.is_owners else 'an administrator'} set it to 0"
        command = await _command_of(connection, holder)
        who = (
            "an owner of the organisation"
            if limit.is_owners
            else "the operator of the installation"
        )
        asked = f", and {wanted} more are wanted" if wanted > 1 else ""
        return QuotaExceeded(
            f"quota {name}: this {holder.kind} may have {limit.most} {NOUNS[name]} and has "
            f"{used}{asked}; {frees}, and `{command}` shows limits and use; {who} may raise it",
            retry_s=retry_s,
        )

    async def _count(
        self, connection: Any, holder: QuotaHolder, name: str, identity: str = ""
    ) -> int:
        """How much of a quota without a counter a holder uses, without what `identity` was admitted
        for."""
        if name == "members":
            return int(await connection.fetchval(SQL["count_members"], holder.id))
        if name == "workspaces":
            return int(await connection.fetchval(SQL["count_workspaces"], holder.id))
        place = (holder.workspace, holder.organisation)
        if name == BYTES:
            return int(await connection.fetchval(SQL["count_bytes"], *place))
        return int(await connection.fetchval(SQL["count_deployments"], *place, identity))

    async def _states_of(self, holder: QuotaHolder) -> list[QuotaState]:
        found = []
        with _seeing_all():
            async with self._lazy.acquire() as connection:
                limits = await self.limits.of_holder(connection, holder)
                place = (holder.workspace, holder.key, holder.organisation)
                counts = await connection.fetchrow(SQL["count_runs"], *place)
                for name, limit in limits.items():
                    window, used, end = WINDOWS.get(name), counts.get(name), None
                    if window is not None:
                        end = (await connection.fetchrow(SQL["window_end"], window))["ends_at"]
                    if name == SAMPLES:
                        used = await connection.fetchval(SQL["count_samples"], holder.workspace)
                    elif used is None and window is not None:
                        used = await connection.fetchval(SQL["used"], str(holder), name, window)
                    elif used is None:
                        used = await self._count(connection, holder, name)
                    found.append(
                        QuotaState(
                            holder.kind, name, limit.most, int(used or 0), end, limit.is_owners
                        )
                    )
        return found


async def _command_of(connection: Any, holder: QuotaHolder) -> str:
    """The command that shows the limits of a holder."""
    if holder.organisation is not None:
        name = await connection.fetchval(SQL["organisation_name"], holder.organisation)
        return f"headrace org quotas {name or holder.organisation}"
    shown = "WORKSPACE"
    if holder.workspace is not None:
        shown = await workspace_name(connection, holder.workspace)
    return f"headrace workspace quotas {shown}"


@contextmanager
def _seeing_all() -> Iterator[None]:
    """Count in the block also what the sender of the request may not see."""
    before = VISIBLE.set(None)
    try:
        yield
    finally:
        VISIBLE.reset(before)
