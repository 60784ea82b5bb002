"""The audit list: who asked for what, and whether it was allowed.

A request only adds an entry in memory. A loop writes the entries, those of changes within FLUSH_S. So a
crash loses the changes of the last FLUSH_S and the counts of the last window at most. The event of a
change names its actor in the same write, and that is never lost.

Entries are chained by hash as they are written (`infra/identity/audit_chain.py`).
"""

import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from infra.identity.api_keys import ApiKeys
from infra.identity.audit_buffer import AuditBuffer, AuditEntry
from infra.identity.audit_chain import HEADS, ChainCheck, ChainReport, chain_of, hash_of
from infra.identity.recent_api_keys import RecentApiKeys
from infra.rate_limited_log import RateLimit
from infra.spine.ports.clock import Clock
from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())

SQL = queries("infra/identity/access.sql")

FLUSH_S = 0.5
TRIM_S = 3600.0
MOST_CHANGES_KEPT = 1_000_000
MOST_OTHERS_KEPT = 200_000
ROWS_AT_ONCE = 5000

COLUMNS = (
    *("at", "last_at", "count", "allowed", "api_key", "owner", "workspace", "address"),
    *("method", "route", "subject", "status", "organisation", "previous_sha256", "sha256"),
)
"""The columns in the order of the parameters of the query insert_audit."""


class AuditList:
    """Writes entries, and returns them."""

    def __init__(self, database: Database, clock: Clock, *, days: int) -> None:
        self._pool = database.durable
        self._clock = clock
        self._days = days
        self._buffer = AuditBuffer()

    def add(self, entry: AuditEntry) -> None:
        """Keep an entry until it is written."""
        self._buffer.add(entry)

    async def flush(self, *, everything: bool = False) -> None:
        """Write the entries that are due, or all. Entries that cannot be written are kept."""
        entries = self._buffer.take(self._clock.now(), everything=everything)
        if not entries:
            return
        rows = [asdict(entry) for entry in entries]
        try:
            async with self._pool.acquire() as connection, connection.transaction():
                heads = dict(await connection.fetch(SQL["lock_heads"]))
                _chain(rows, heads)
                columns = ([row[name] for row in rows] for name in COLUMNS)
                await connection.execute(SQL["insert_audit"], *columns)
                await connection.execute(SQL["set_heads"], list(heads), list(heads.values()))
        except BaseException:
            self._buffer.put_back(entries)
            raise

    async def page(
        self,
        *,
        since: datetime | None,
        api_key: str | None,
        workspace: str | None,
        limit: int,
        offset: int,
        organisation: str | None = None,
    ) -> tuple[list[dict[str, Any]], int]:
        """A page of entries, the newest first, and how many there are in all. `api_key` is the id,
        the name or the owner of an API key. With a workspace or an organisation
        only the entries of its keys."""
        await self.flush(everything=True)
        rows = await self._pool.fetch(
            SQL["page_of_audit"], since, api_key, workspace, organisation, limit, offset
        )
        total = await self._pool.fetchval(
            SQL["count_audit"], since, api_key, workspace, organisation
        )
        return [dict(row) for row in rows], int(total)

    async def export(self) -> AsyncIterator[dict[str, Any]]:
        """All entries that were written before the call, the oldest first, with their hashes as
        hexadecimal digits (None for entries from before there were chains); and at last the heads of the
        chains, so that a reader knows that nothing is missing at the end."""
        await self.flush(everything=True)
        heads = await self._pool.fetch(SQL["audit_heads"])
        async for row in self._rows(heads[0]["last_id"]):
            yield row
        yield {HEADS: {head["chain"]: head["sha256"] for head in heads}}

    async def verify(self) -> Mapping[str, ChainReport]:
        """Verify both chains, from the oldest entry that is kept to the head."""
        await self.flush(everything=True)
        heads = await self._pool.fetch(SQL["audit_heads"])
        check = ChainCheck()
        async for row in self._rows(heads[0]["last_id"]):
            check.add(row)
        return check.finish({head["chain"]: head["sha256"] for head in heads})

    async def _rows(self, last_id: int) -> AsyncIterator[dict[str, Any]]:
        after = 0
        while rows := await self._pool.fetch(SQL["audit_after"], after, last_id, ROWS_AT_ONCE):
            for row in rows:
                yield dict(row)
            after = rows[-1]["id"]

    async def trim(
        self, *, changes: int = MOST_CHANGES_KEPT, others: int = MOST_OTHERS_KEPT
    ) -> None:
        """Delete the entries that are older than the setting allows, and all but the newest `changes`
        changes and `others` other entries. The newest one of each kind is kept."""
        oldest = self._clock.now() - timedelta(days=self._days)
        await self._pool.execute(SQL["trim_audit"], oldest, changes, others)


def _chain(rows: list[dict[str, Any]], heads: dict[str, bytes]) -> None:
    """Give each row its hashes, and the heads (chain -> last hash) those of the last rows."""
    for row in rows:
        chain = chain_of(row)
        row["previous_sha256"] = heads[chain]
        row["sha256"] = heads[chain] = hash_of(heads[chain], row)


async def record_access(
    audit: AuditList, recent: RecentApiKeys, api_keys: ApiKeys, clock: Clock
) -> None:
    """Write audit entries and the last uses of API keys, until cancelled."""
    trimmed_at = float("-inf")
    try:
        while True:
            try:
                await audit.flush()
                await _write_used(recent, api_keys)
                if clock.elapsed_s() - trimmed_at >= TRIM_S:
                    trimmed_at = clock.elapsed_s()
                    await audit.trim()
            except UNAVAILABLE_ERRORS as error:
                logger.warning("audit entries are written later: %s", error)
            await clock.sleep(FLUSH_S)
    finally:
        await audit.flush(everything=True)


async def _write_used(recent: RecentApiKeys, api_keys: ApiKeys) -> None:
    used: dict[str, datetime] = recent.take_used()
    if used:
        await api_keys.mark_used(used)
