"""Alerts about runs that ended, failed, collapsed or stalled.

The control process looks at the read model, and puts each alert into a table before it is sent. It is
sent until the channel takes it, so it arrives at least once: a process that dies before it has recorded
that sends it again.
"""

import asyncio
import json
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from infra.operations.maintenance.alert_channels import AT_ONCE, AlertAway, AlertChannels
from infra.operations.maintenance.alert_targets import AlertTargets
from infra.rate_limited_log import RateLimit
from infra.readmodel.store import ReadModel
from infra.settings.alerts import AlertSettings
from infra.settings.git import AllowedAddresses
from infra.spine.ports.event_log import EventLog
from infra.spine.postgres.advisory_lock import lead
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import TransientError
from schemas.secrets.redact import redact

SQL = queries("infra/operations/maintenance/alerts.sql")

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())

LOCK = 0x414C5254
"""The advisory lock of the control process that alerts ("ALRT")."""

LOOK_EVERY_S = 15.0
BATCH = 5
"""How many alerts of a channel are sent before it waits for the next look."""

LOOKED_AT_ONCE = 100
"""Runs whose curves are read together. The next look goes on after the last of them."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 3600.0
MOST_ATTEMPTS = 60
"""Attempts to deliver an alert, over about two days."""

REWARD, ENTROPY = "rollout/raw_reward", "train/entropy_loss"
LEAST_STEPS = 20
SAMPLED_POINTS = 200
WINDOW = 10
"""A collapse is a matter of means of so many points, so that noise is not one."""

LOST_PART, LEAST_ENTROPY_PART = 0.5, 0.05
FAILED = ("failed", "crashed", "killed")
LONGEST_TEXT = 500


def collapse_of(rewards: Sequence[float], entropies: Sequence[float]) -> str | None:
    """Why a run has collapsed: the newest rewards lost more than half of what the best ones had gained,
    or the entropy is nearly gone. None when it has not."""
    means = _means(rewards)
    if len(means) > 1:
        first, best, newest = means[0], max(means), means[-1]
        if best > first and best - newest > LOST_PART * (best - first):
            return f"its reward fell from {best:.3g} to {newest:.3g}"
    means = _means(entropies)
    if len(means) > 1 and 0 <= means[-1] < LEAST_ENTROPY_PART * means[0]:
        return f"its entropy fell from {means[0]:.3g} to {means[-1]:.3g}"
    return None


def _means(values: Sequence[float]) -> list[float]:
    finite = [value for value in values if math.isfinite(value)]
    parts = (finite[end - WINDOW : end] for end in range(WINDOW, len(finite) + 1))
    return [fmean(part) for part in parts]


class Alerts:
    """Finds what is to be told about runs, and tells it."""

    def __init__(
        self,
        database: Database,
        log: EventLog,
        readmodel: ReadModel,
        settings: AlertSettings,
        *,
        targets: AlertTargets,
        target_addresses: AllowedAddresses,
        public_url: str,
    ) -> None:
        self._pool = database.durable
        self._log = log
        self._readmodel = readmodel
        self._settings = settings
        self._targets = targets
        self._channels = AlertChannels(settings, targets, allowed=target_addresses)
        self._url = public_url.rstrip("/")
        self._looked_at = ""

    async def run(self) -> None:
        """Look and send until cancelled."""
        try:
            while True:
                try:
                    await self.look()
                    await self.deliver()
                except TransientError as error:
                    logger.warning("alerts are looked for again in %.0f s: %s", LOOK_EVERY_S, error)
                except Exception:  # an alert that fails must not end the process that serves all
                    logger.exception("alerts could not be made; they are looked for again")
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await self._channels.aclose()

    async def look(self) -> None:
        """Put what is to be told into the table. While the read model is behind the log, its runs may
        look stalled, so nothing is put then."""
        await self._pool.execute(SQL["begin"])
        if not await self._readmodel.caught_up(await self._log.visible_head()):
            return
        for run in await self._pool.fetch(SQL["ended_runs"]):
            await self._put(run, "failed" if run["status"] in FAILED else "ended", run["status"])
        if self._settings.stalled_min:
            for run in await self._pool.fetch(SQL["stalled_runs"], self._settings.stalled_min):
                why = f"stalled: no progress for {self._settings.stalled_min} minutes"
                await self._put(run, f"stalled at step {run['step']}", why)
        running = await self._pool.fetch(
            SQL["runs_in_training"], LEAST_STEPS, self._looked_at, LOOKED_AT_ONCE
        )
        for run in running:
            curves = await self._readmodel.runs.sampled_curves(
                run["run"], [REWARD, ENTROPY], most=SAMPLED_POINTS
            )
            values = {key: [value for _, value in points] for key, points in curves.items()}
            collapse = collapse_of(values.get(REWARD, []), values.get(ENTROPY, []))
            if collapse is not None:
                await self._put(run, "collapsed", f"collapsed: {collapse}")
        self._looked_at = running[-1]["run"] if len(running) == LOOKED_AT_ONCE else ""

    async def deliver(self) -> None:
        """Send what is due, to several channels at once. What a channel does not take is sent again
        later, less and less often."""
        by_channel = defaultdict(list)
        for row in await self._pool.fetch(SQL["due"], list(self._settings.channels), BATCH):
            by_channel[row["channel"]].append(row)
        places = asyncio.Semaphore(AT_ONCE)

        async def serve(channel: str) -> None:
            async with places:
                for row in by_channel[channel]:
                    if not await self._send(row):
                        return

        await asyncio.gather(*map(serve, by_channel))

    async def _send(self, row: Mapping[str, Any]) -> bool:
        """Send an alert. Returns whether its channel took it."""
        key = (row["run"], row["kind"], row["channel"])
        try:
            await self._channels.send(row["channel"], "/".join(key[:2]), row["content"])
        except AlertAway as error:
            attempts = row["attempts"] + 1
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempts - 1, 12))
            last = attempts >= MOST_ATTEMPTS
            await self._pool.execute(SQL["failed"], *key, str(error), None if last else pause_s)
            await self._targets.note(row["channel"], str(error))
            logger.warning("an alert about run %s is not delivered: %s", row["run"], error)
            return False
        await self._pool.execute(SQL["sent"], *key)
        await self._targets.note(row["channel"], None)
        return True

    async def _put(self, run: Mapping[str, Any], kind: str, what: str) -> None:
        reward = run["reward"]
        content = {
            "text": f"run {run['name']}: {what}",
            "kind": kind.partition(" ")[0],
            "run": run["run"],
            "name": run["name"],
            "status": run["status"],
            "step": run["step"],
            "total_steps": run["total_steps"],
            "reward": reward if reward is not None and math.isfinite(reward) else None,
            "error": redact(run["error"])[:LONGEST_TEXT] if run["error"] else None,
            "url": f"{self._url}/runs/{run['run']}",
        }
        channels = list(self._settings.channels)
        await self._pool.execute(
            SQL["put"], run["run"], kind, channels, json.dumps(content), content["kind"]
        )


async def alert_alone(alerts: Alerts, database_url: str) -> None:
    """Alert until cancelled, while no other control process does. A frozen one, or one whose session
    ended, lets another one alert."""
    while True:
        try:
            await lead(database_url, LOCK, alerts.run)
        except TransientError as error:
            logger.warning("alerts begin again in %.0f s: %s", LOOK_EVERY_S, error)
            await asyncio.sleep(LOOK_EVERY_S)
