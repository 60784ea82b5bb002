"""Collects the git mirrors of this machine when the control process starts, and again every six hours.

Mirrors are copies, so nothing is lost when one is removed that is needed later.
"""

import logging
from collections.abc import Awaitable, Callable, Container

from infra.names import workspace_ids
from infra.spine.ports.clock import Clock
from infra.spine.postgres.pool import Database
from schemas.errors import HeadraceError

logger = logging.getLogger(__name__)

EVERY_S = 6 * 3600.0


async def collect_mirrors(
    collect: Callable[[Container[str]], Awaitable[int]], database: Database, clock: Clock
) -> None:
    """Call `collect` with the ids of all workspaces, until cancelled. A failure is tried again the next
    time."""
    while True:
        try:
            if removed := await collect(await workspace_ids(database)):
                logger.info("removed the git mirrors of %d workspaces that nobody uses", removed)
        except (HeadraceError, OSError) as error:
            logger.warning("git mirrors were not collected, and are the next time: %s", error)
        await clock.sleep(EVERY_S)
