"""One message makes its decider raise: find out whether it always does, and put it aside if so."""

import logging
from collections.abc import Sequence

from infra.draft import DecisionError, Drafter, Work
from infra.log import Unwritable, encode
from infra.poison import dead_letter, dead_outcome
from infra.ports import Effects, EventLog
from infra.states import States

logger = logging.getLogger(__name__)

TRIES = 3
"""How often a message whose decider raises is tried before it is a dead letter."""


class Isolation:
    """Takes the message that cannot be decided on out of a batch, so that its neighbours go on."""

    def __init__(self, log: EventLog, effects: Effects, states: States, drafter: Drafter) -> None:
        self._log = log
        self._effects = effects
        self._states = states
        self._drafter = drafter

    async def without(self, works: Sequence[Work], error: DecisionError) -> Sequence[Work]:
        """Try the culprit alone; returns the others once it is put aside, all of them if it turns out
        well (the stream has moved on)."""
        logger.exception("%s", error, exc_info=error)
        culprit = error.work
        for _ in range(TRIES - 1):
            self._states.forget(culprit.streams)
            if await self._decides(culprit):
                return works
        await self._put_aside(culprit, error)
        return [work for work in works if work is not culprit]

    async def _decides(self, work: Work) -> bool:
        """Whether a decision on it comes about that the log would take."""
        try:
            draft = await self._drafter.draft([work])
            for new in draft.events:
                encode(new.event)
        except (DecisionError, Unwritable):
            return False
        return True

    async def _put_aside(self, work: Work, error: DecisionError) -> None:
        if work.claimed is not None:
            await dead_outcome(self._log, work.claimed, error)
            await self._effects.release(work.claimed)
        if work.recorded is not None:
            name, message = work.consumer.name, work.recorded
            await dead_letter(self._log, name, message, error, delivery=work.delivery, pauses=True)
