"""What no decider can take is kept from the others: a record that cannot be read, and a message whose
decider raises, once it is known that it always does."""

import logging
from collections.abc import Sequence

from infra.ports.effects import Effects
from infra.ports.event_log import CommitMiss, EventStore, Recorded
from infra.postgres.codec import Unwritable, encode
from infra.postgres.errors import DatabaseUnavailable
from infra.runtime.cascade import Apart, DecisionError, Drafter, DraftRefused, Work
from infra.runtime.consumer import AnyConsumer
from infra.runtime.dead_letters import dead_letter, dead_outcome, redriven
from infra.runtime.folded_states import States
from schemas.envelope import BadEvent
from schemas.events import MessageRedriven

logger = logging.getLogger(__name__)

TRIES = 3
"""How often a message whose decider raises is tried before it is a dead letter."""


Batch = tuple[Sequence[Work], Apart]
"""Messages to decide on together, and what of the cascade is left to the bus."""


class Isolation:
    """Takes what cannot be decided on out of a batch, so that its neighbours go on."""

    def __init__(self, log: EventStore, effects: Effects, states: States, drafter: Drafter) -> None:
        self._log = log
        self._effects = effects
        self._states = states
        self._drafter = drafter

    async def read(self, consumer: AnyConsumer, recorded: Recorded) -> Work | None:
        """What a record asks of a consumer, if anything. One that cannot be decoded, or about which the
        consumer cannot say whose it is, is a dead letter: its type is one that the consumer reads."""
        message: Recorded | None = recorded
        try:
            if isinstance(recorded.event, MessageRedriven):
                message = await redriven(self._log, consumer.name, recorded.event)
            wanted = message is not None and consumer.routes(message.event)
        except DatabaseUnavailable:
            raise
        except Exception as error:
            await dead_letter(
                self._log,
                consumer.name,
                message or recorded,
                error,
                delivered=recorded,
                pauses=not isinstance(error, BadEvent),
            )
            return None
        self._states.observe(recorded)
        if message is None or not wanted:
            return None
        return Work(
            consumer=consumer,
            message=message.event,
            id=message.id,
            correlation=message.correlation,
            traceparent=message.traceparent,
            recorded=message,
            delivered=recorded,
        )

    async def parted(
        self, works: Sequence[Work], apart: Apart, refused: DraftRefused
    ) -> Sequence[Batch]:
        """The log refuses what was decided on `works`, and does not say whose fault it is: leave what
        follows to the bus, then halve them, until one is left that it refuses; that one is put aside."""
        ours = {(work.consumer.name, work.id) for work in works}
        if cascade := refused.decided - ours:
            return [(works, apart | cascade)]
        if len(works) > 1:
            half = len(works) // 2
            return [(works[:half], apart), (works[half:], apart)]
        (culprit,) = works
        error = DecisionError(culprit, str(refused), read=refused.read)
        logger.error("%s", error, exc_info=refused)
        try:
            await self._put_aside(error)
        except CommitMiss:
            return [(works, apart)]
        return []

    async def without(
        self, works: Sequence[Work], error: DecisionError
    ) -> Sequence[Sequence[Work]]:
        """Try the culprit alone. Returns the others once it is put aside; if it turns out well (the
        stream has moved on, or it is only its neighbours that it cannot follow) the others, and then
        the culprit alone."""
        logger.exception("%s", error, exc_info=error)
        culprit = error.work
        for _ in range(TRIES - 1):
            self._states.forget(culprit.streams)
            failure = await self._failure(culprit)
            if failure is None:
                return _alone(culprit, works)
            error = failure
        try:
            await self._put_aside(error)
        except CommitMiss:
            return _alone(culprit, works)
        return _alone(culprit, works)[:1]

    async def _failure(self, work: Work) -> DecisionError | None:
        """Why no decision on it comes about that the log would take; None when one does. What follows
        from it elsewhere is not its fault."""
        try:
            draft = await self._drafter.draft([work])
            for new in draft.events:
                encode(new.event)
        except Unwritable as error:
            failure = draft.unwritable(error)
        except DecisionError as error:
            failure = error
        else:
            return None
        return failure if failure.work is work else None

    async def _put_aside(self, error: DecisionError) -> None:
        """Raises CommitMiss when the streams on which it was decided have moved."""
        work = error.work
        if work.claimed is not None:
            await dead_outcome(self._log, work.claimed, error, read=error.read)
            await self._effects.release(work.claimed)
        if work.recorded is not None:
            await dead_letter(
                self._log,
                work.consumer.name,
                work.recorded,
                error,
                delivered=work.delivered,
                pauses=True,
                read=error.read,
            )


def _alone(culprit: Work, works: Sequence[Work]) -> Sequence[Sequence[Work]]:
    """The others, and then the culprit."""
    return [[work for work in works if work is not culprit], [culprit]]
