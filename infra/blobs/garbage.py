"""Collects orphans: blobs of ended runs that no event names, and what removed events named.

A worker that dies between writing a blob and reporting it leaves an orphan. Only runs that are closed
and have no effects left are examined, because a writer always belongs to a run that is not. A blob that
no event names by then is never named later: an event names either what was just written or what another
event named, and a manifest names nothing else. The grace period covers a writer that was still at work
when the run was closed (an attempt takes six hours at most).

When a run is archived or deleted, or a dataset deleted, its bytes become orphans too, including small
artifacts (rows). Their grace period covers a request that looked the run or dataset up just before: once
it has appended, its event names what it needs. A snapshot of a workspace is collected when the last
event that named it was removed. Nothing is collected while an archive is being restored.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from asyncpg import LockNotAvailableError

from infra.blobs.artifacts import SHARED
from infra.blobs.installed import InstalledBlobs
from infra.blobs.references import named_uris
from infra.spine.ports.artifacts import ROW
from infra.spine.ports.clock import Clock
from infra.spine.postgres.advisory_lock import Check, exclusively
from infra.spine.postgres.pool import Database
from schemas.errors import HeadraceError, TransientError
from schemas.ids import workspace_stream

logger = logging.getLogger(__name__)

GRACE = timedelta(hours=24)
REMOVED_GRACE = timedelta(hours=1)
EVERY_S = 6 * 3600.0
"""How often the server looks for orphans."""

COLLECTING = 0x434F4C4C
"""The advisory lock of a process that collects, or restores what could be collected ("COLL")."""

LOCK_S = 60.0
"""How long the collector waits for a restore."""

ENDED = """
(select g.run_id, r.at as removed_at, false as is_gone
 from run_gates g left join removals r on r.owner = g.run_id
 where g.state = 'closed' and g.run_id > $1
 and not exists (select from effects e where e.run_id = g.run_id)
 order by g.run_id limit $2)
union all
(select r.owner, r.at, true from removals r
 where r.owner > $1 and not exists (select from run_gates g where g.run_id = r.owner)
 order by r.owner limit $2)
order by run_id limit $2
"""
"""A page of the runs that may have orphans, after a run's id. One whose gate was removed is gone."""

FORGET_REMOVED = "delete from removals where owner = $1"

DISCARDED = "select uri from discarded_blobs where at < $1"

RUNS = "runs/"
FORGET_DISCARDED = "delete from discarded_blobs where uri = $1"
LOCK_STREAM = "select true from streams where stream = $1 for update skip locked"
IS_AT_WORK = "select exists (select from effects where run_id = $1)"

TABLE_S = 5.0
"""How long the collector waits for transactions that store artifacts."""

AT_ONCE = 1000
"""How many rows, runs or blobs are examined together. An index says which of them an event names, so
that neither the time nor the memory for a page depends on the length of the log."""


async def collect(
    database: Database, blobs: InstalledBlobs, *, now: datetime, grace: timedelta = GRACE
) -> int:
    """Delete the orphans that are older than `grace`, and the bytes of runs and datasets that were
    removed more than REMOVED_GRACE ago. Returns how many were deleted. Raises DatabaseUnavailable,
    TransientError."""
    async with exclusively(database.url, COLLECTING, within_s=LOCK_S) as check:
        num_blobs = num_rows = 0
        async for old in _pages_of_old_blobs(database, blobs, now=now, grace=grace):
            num_blobs += await _delete_unnamed(database, blobs, old, check)
        num_blobs += await _delete_shared(database, blobs, check, before=now - grace)
        num_blobs += await _delete_snapshots(database, blobs, check, now=now)
        while rows := await _old_rows(database, now):
            num_rows += await _delete_rows(database, rows)
        await _forget_discarded(database, blobs, now)
    if num_blobs or num_rows:
        logger.info("deleted %d blobs and %d rows that no event names", num_blobs, num_rows)
    return num_blobs + num_rows


async def _delete_unnamed(
    database: Database, blobs: InstalledBlobs, old: Mapping[str, str], check: Check
) -> int:
    """Delete the blobs (key -> URI) that no event names. Returns how many were. `check` raises when the
    lock is lost: then an archive may be restored, whose blobs no event names yet.

    The index is read after the listing, so whatever was reported since is among the names."""
    named = await _find_named(database, blobs, old)
    orphans = [uri for key, uri in old.items() if key not in named]
    for uri in orphans:
        await check()
        await blobs.delete(uri)
    return len(orphans)


async def _delete_shared(
    database: Database, blobs: InstalledBlobs, check: Check, *, before: datetime
) -> int:
    """Delete the shared blobs that no event names and that no run has stored since `before`. Returns how
    many were."""
    listed = [blob.key for blob in await blobs.keys(SHARED)]
    count = 0
    for first in range(0, len(listed), AT_ONCE):
        page = listed[first : first + AT_ONCE]
        for key in set(page) - await _find_named(database, blobs, page):
            await check()
            count += await blobs.delete_shared(key, before=before)
    return count


async def _delete_snapshots(
    database: Database, blobs: InstalledBlobs, check: Check, *, now: datetime
) -> int:
    """Delete the snapshots of workspaces that a removed event named and that no event names any more.
    Returns how many were."""
    count = 0
    for row in await database.lazy.fetch(DISCARDED, now - REMOVED_GRACE):
        key = await blobs.key(row["uri"]) or ""
        if key.startswith(RUNS):
            await check()
            count += await _delete_snapshot(database, blobs, key, row["uri"])
    return count


async def _delete_snapshot(database: Database, blobs: InstalledBlobs, key: str, uri: str) -> bool:
    """Delete a snapshot that no event names while its workspace has no work. Returns whether it was.

    A workspace may store a snapshot again at any time, and names it in the event that ends its effect.
    Effects are requested and ended with a lock on its stream. While the collector has this lock, a
    workspace without an effect gets none before the snapshot is deleted. One that is busy is left for
    the next time."""
    owner = key.split("/")[1]
    async with database.lazy.acquire() as connection, connection.transaction():
        is_locked = await connection.fetchval(LOCK_STREAM, workspace_stream(owner))
        if not is_locked or await connection.fetchval(IS_AT_WORK, owner):
            return False
        if await _find_named(database, blobs, [key]):
            await connection.execute(FORGET_DISCARDED, uri)
            return False
        await blobs.delete(uri)
    return True


async def _find_named(database: Database, blobs: InstalledBlobs, keys: Iterable[str]) -> set[str]:
    """Return the keys of the blobs that an event names."""
    uris = {f"{place}/{key}": key for place in await blobs.places() for key in keys}
    async with database.lazy.acquire() as connection:
        return {uris[uri] for uri in await named_uris(connection, [*uris])}


async def _pages_of_old_blobs(
    database: Database, blobs: InstalledBlobs, *, now: datetime, grace: timedelta
) -> AsyncIterator[dict[str, str]]:
    """Yield key -> URI of the blobs that may be orphans: those of ended and removed runs, and of deleted
    datasets."""
    page = await _discarded_blobs(database, blobs, now)
    async for run, removed_at, is_gone in _ended_runs(database):
        if removed_at is not None and removed_at > now - REMOVED_GRACE:
            continue
        found = await blobs.keys(f"{RUNS}{run}/")
        if is_gone and not found:
            await database.lazy.execute(FORGET_REMOVED, run)
        for blob in found:
            if removed_at is not None or blob.modified < now - grace:
                page[blob.key] = blob.uri
            if len(page) >= AT_ONCE:
                yield page
                page = {}
    if page:
        yield page


async def _ended_runs(database: Database) -> AsyncIterator[tuple[str, datetime | None, bool]]:
    """Yield the runs that may have orphans, when they were removed, and whether they are gone."""
    last = ""
    while found := await database.lazy.fetch(ENDED, last, AT_ONCE):
        for row in found:
            yield row["run_id"], row["removed_at"], row["is_gone"]
        last = found[-1]["run_id"]


async def _discarded_blobs(
    database: Database, blobs: InstalledBlobs, now: datetime
) -> dict[str, str]:
    """Return key -> URI of the blobs of deleted datasets. A blob that was stored again since then,
    because the same content was uploaded once more, is left out."""
    old: dict[str, str] = {}
    discarded = await database.lazy.fetch(DISCARDED, now - REMOVED_GRACE)
    for key in {await blobs.key(row["uri"]) for row in discarded} - {None}:
        if str(key).startswith(RUNS):
            continue
        for blob in await blobs.keys(str(key)):
            if blob.key == key and blob.modified < now - REMOVED_GRACE:
                old[blob.key] = blob.uri
    return old


async def _forget_discarded(database: Database, blobs: InstalledBlobs, now: datetime) -> None:
    """Forget the discarded blobs that are deleted now. Others may have been kept for a backup."""
    for row in await database.lazy.fetch(DISCARDED, now - REMOVED_GRACE):
        if await blobs.exists(await blobs.key(row["uri"]) or "none") is None:
            await database.lazy.execute(FORGET_DISCARDED, row["uri"])


async def _old_rows(database: Database, now: datetime) -> list[str]:
    found = await database.lazy.fetch(
        "select sha256 from discards where at < $1 order by at limit $2",
        now - REMOVED_GRACE,
        AT_ONCE,
    )
    return [row["sha256"] for row in found]


async def _delete_rows(database: Database, rows: Sequence[str]) -> int:
    """Delete artifacts that no event names. Commits that store artifacts wait meanwhile, because one of
    them may name a row that it found there. Raises TransientError when one of them takes too long."""
    async with database.lazy.acquire() as connection, connection.transaction():
        await connection.execute(f"set local lock_timeout = {round(TABLE_S * 1000)}")
        try:
            await connection.execute("lock table artifacts in share row exclusive mode")
        except LockNotAvailableError as error:
            raise TransientError(
                f"a transaction that stores artifacts has been open for {TABLE_S:.0f} s"
            ) from error
        named = await named_uris(connection, [ROW + sha256 for sha256 in rows])
        orphans = [sha256 for sha256 in rows if ROW + sha256 not in named]
        tag = await connection.execute("delete from artifacts where sha256 = any ($1)", orphans)
        await connection.execute("delete from discards where sha256 = any ($1)", rows)
    return int(tag.split()[1])


async def collecting(database: Database, blobs: InstalledBlobs, clock: Clock) -> None:
    """Collect every EVERY_S, until cancelled. A database or store that does not answer is tried again
    next time."""
    while True:
        await clock.sleep(EVERY_S)
        try:
            await collect(database, blobs, now=clock.now())
        except (HeadraceError, OSError) as error:
            logger.warning(
                "orphans were not collected, the next try is in %.0f h: %s", EVERY_S / 3600, error
            )
