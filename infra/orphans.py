"""Collects orphans: blobs of runs that have ended which no event names.

A worker that dies between putting a blob and telling of it leaves one. Only runs that are closed, with
no work of theirs left, are looked at: whoever writes belongs to a run that is not. What no event names
by then no event ever will, for events name what was just put, or what others named; a manifest names
nothing else either. The grace is for whoever was writing when the run was closed (an attempt takes six
hours at most).
"""

import logging
from datetime import datetime, timedelta

from infra.database import Database
from infra.installed import InstalledBlobs
from infra.named import named
from infra.ports import Clock
from schemas.errors import HeadraceError

logger = logging.getLogger(__name__)

GRACE = timedelta(hours=24)
EVERY_S = 6 * 3600.0
"""How often they are looked for."""

ENDED = """
select run_id from run_gates g where state = 'closed'
and not exists (select from effects e where e.run_id = g.run_id)
"""


async def collect(
    database: Database, blobs: InstalledBlobs, *, now: datetime, grace: timedelta = GRACE
) -> int:
    """Delete the orphans that are older than `grace`; returns how many. Raises Away, TransientError."""
    ended = [row["run_id"] for row in await database.lazy.fetch(ENDED)]
    old = {
        blob.key: blob.uri
        for run in ended
        for blob in await blobs.keys(f"runs/{run}/")
        if blob.modified < now - grace
    }
    if not old:
        return 0
    # After the listing: what was told of meanwhile is among the names.
    async with database.lazy.acquire() as connection, connection.transaction(readonly=True):
        async for found in named(connection):
            old.pop(await blobs.key(found.ref.uri) or "", None)
    for uri in old.values():
        await blobs.delete(uri)
    if old:
        logger.info("%d blobs that nothing names are deleted", len(old))
    return len(old)


async def collecting(database: Database, blobs: InstalledBlobs, clock: Clock) -> None:
    """Collect now and again, for ever. What is away then is asked next time."""
    while True:
        await clock.sleep(EVERY_S)
        try:
            await collect(database, blobs, now=clock.now())
        except (HeadraceError, OSError) as error:
            logger.warning("orphans are left for the next time: %s", error)
