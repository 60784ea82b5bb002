"""Effects that a live worker holds without progress for far longer than the work of their lane takes.

Leases say that a process is alive, not that its work goes on. Such an effect keeps a place of its worker
and its run waits, so each is logged once, and shown wherever operators look.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.readmodel.wait_reasons import MOST_SILENT_S, describe_stall
from infra.spine.ports.clock import Clock
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import HeadraceError

logger = logging.getLogger(__name__)

SQL = queries("infra/readmodel/read_model.sql")

EVERY_S = 60.0
"""How often the control process looks for such effects."""


@dataclass(frozen=True, slots=True)
class StalledEffect:
    """An effect without progress, its claim, and for how long."""

    id: str
    epoch: int
    type: str
    lane: str
    run: str
    worker: str
    seconds: float

    @property
    def claim(self) -> tuple[str, int]:
        return self.id, self.epoch


class StalledEffects:
    """Queries over effects without progress."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def find_stalled(self) -> Sequence[StalledEffect]:
        """Return up to 100, the longest first."""
        lanes, limits = list(MOST_SILENT_S), list(MOST_SILENT_S.values())
        rows = await self._pool.fetch(SQL["stalled_effects"], lanes, limits)
        return [StalledEffect(**dict(row)) for row in rows]

    async def count(self) -> Mapping[str, int]:
        """Return lane -> effects without progress. Lanes without any are left out."""
        return Counter(one.lane for one in await self.find_stalled())


async def watch_stalled_effects(effects: StalledEffects, clock: Clock) -> None:
    """Log each effect without progress once per claim, until cancelled."""
    known: set[tuple[str, int]] = set()
    while True:
        try:
            found = await effects.find_stalled()
        except HeadraceError as error:
            logger.warning("effects without progress cannot be looked for now: %s", error)
        else:
            for one in found:
                if one.claim not in known:
                    told = describe_stall(one.type, one.lane, one.worker, one.seconds)
                    logger.warning("run %s: %s", one.run, told)
            known = {one.claim for one in found}
        await clock.sleep(EVERY_S)
