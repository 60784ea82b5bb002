"""Separates the messages that cannot be decided on from the others: a record that cannot be read, and a
message on which its decider always raises. Both become dead letters, and the other messages continue."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from infra.spine.ports.effects import Effects
from infra.spine.ports.event_log import CommitMiss, EventStore, Recorded
from infra.spine.postgres.codec import Unwritable, encode
from infra.spine.postgres.errors import DatabaseUnavailable
from infra.spine.runtime.cascade import DecisionError, Delivery, DeliveryKey, Drafter, DraftRefused
from infra.spine.runtime.consumer import AnyConsumer
from infra.spine.runtime.dead_letters import dead_letter_message, dead_letter_outcome, find_redriven
from infra.spine.runtime.folded_states import StateCache
from schemas.effects.effect import Failed
from schemas.envelope import BadEvent, NewerEvent
from schemas.errors import FailureCategory
from schemas.events.dead_letters import MessageRedriven
from schemas.text import plain

logger = logging.getLogger(__name__)

LEFT_S = 30.0
"""When an effect may be claimed again whose outcome only a newer release can use."""

TRIES = 3
"""How often a message whose decider raises is tried before it is a dead letter."""


class DeliveryBatch(NamedTuple):
    """Deliveries to decide on together, and the part of their cascade that is left to the bus."""

    deliveries: Sequence[Delivery]
    left_to_bus: frozenset[DeliveryKey] = frozenset()


class Quarantine:
    """Removes from a batch what cannot be decided on, so that the other deliveries continue."""

    def __init__(
        self, log: EventStore, effects: Effects, states: StateCache, drafter: Drafter
    ) -> None:
        self._log = log
        self._effects = effects
        self._states = states
        self._drafter = drafter

    async def read(self, consumer: AnyConsumer, recorded: Recorded) -> Delivery | None:
        """Return the delivery of a record to a consumer; None when the consumer does not decide on it. A
        record that cannot be decoded, or that the consumer cannot route, becomes a dead letter, because
        its type is one that the consumer reads. Raises NewerEvent, with nothing done."""
        message: Recorded | None = recorded
        try:
            if isinstance(recorded.event, MessageRedriven):
                message = await find_redriven(self._log, consumer.name, recorded.event)
            wanted = message is not None and consumer.routes(message.event)
        except (DatabaseUnavailable, NewerEvent):
            raise
        except Exception as error:  # a consumer may have any bug
            await dead_letter_message(
                self._log,
                consumer.name,
                message or recorded,
                error,
                brought_by=recorded,
                pauses=not isinstance(error, BadEvent),
            )
            return None
        self._states.observe(recorded)
        if message is None or not wanted:
            return None
        return Delivery(
            consumer=consumer,
            message=message.event,
            id=message.id,
            correlation=message.correlation,
            traceparent=message.traceparent,
            record=message,
            brought_by=recorded,
        )

    async def split_refused(
        self, batch: DeliveryBatch, refused: DraftRefused
    ) -> Sequence[DeliveryBatch]:
        """Return the batches to try instead of one whose draft the log refuses without saying which
        decision it refuses. First the cascade is left to the bus. Then the batch is halved until only
        one refused delivery remains. It is put aside, or decided as a failure of its effect."""
        deliveries, left_to_bus = batch
        ours = {delivery.key for delivery in deliveries}
        if cascade := refused.decided - ours:
            return [DeliveryBatch(deliveries, left_to_bus | cascade)]
        if len(deliveries) > 1:
            half = len(deliveries) // 2
            return [
                DeliveryBatch(deliveries[:half], left_to_bus),
                DeliveryBatch(deliveries[half:], left_to_bus),
            ]
        (culprit,) = deliveries
        if failure := _failure_of(culprit, refused):
            return [DeliveryBatch([failure], left_to_bus)]
        error = DecisionError(culprit, str(refused), read=refused.read)
        logger.error("%s", error, exc_info=refused)
        try:
            await self._put_aside(error)
        except CommitMiss:
            return [batch]
        return []

    async def leave(self, delivery: Delivery, error: DecisionError) -> None:
        """Leave a delivery for a newer release. An event stays unconsumed. An outcome is lost, because
        nobody here can decide on it: its effect is given back, and performed again later."""
        logger.warning("a newer release has to decide: %s", error)
        self._states.forget(delivery.streams)
        if delivery.claimed is not None:
            await self._effects.retry(
                delivery.claimed, delay_s=LEFT_S, error=str(error), counted=False
            )

    async def isolate(
        self, deliveries: Sequence[Delivery], error: DecisionError
    ) -> Sequence[Sequence[Delivery]]:
        """Try the culprit alone. Returns the others once it is put aside. If it succeeds alone (its
        stream has moved on, or only its neighbours keep it from being decided), returns the others and
        then the culprit by itself. Also returns both if the log cannot hold what the culprit, an
        outcome, leads to: the culprit is then a failure of its effect."""
        logger.exception("%s", error, exc_info=error)
        culprit = error.delivery
        for _ in range(TRIES - 1):
            self._states.forget(culprit.streams)
            failure = await self._failure_alone(culprit)
            if failure is None:
                return _others_then(culprit, deliveries)
            error = failure
        if error.unwritable and (failed := _failure_of(culprit, error)):
            return [_others_then(culprit, deliveries)[0], [failed]]
        try:
            await self._put_aside(error)
        except CommitMiss:
            return _others_then(culprit, deliveries)
        return _others_then(culprit, deliveries)[:1]

    async def _failure_alone(self, delivery: Delivery) -> DecisionError | None:
        """Return why a decision on this delivery alone fails, or None when it succeeds. A failure in
        another consumer's decision that follows from it does not count."""
        try:
            draft = await self._drafter.draft([delivery])
            for new in draft.events:
                encode(new.event)
        except Unwritable as error:
            failure = draft.blame_author(error)
        except DecisionError as error:
            failure = error
        else:
            return None
        return failure if failure.delivery is delivery else None

    async def _put_aside(self, error: DecisionError) -> None:
        """Put the failed delivery aside. Raises CommitMiss when the streams on which it was decided have
        new events."""
        delivery = error.delivery
        if delivery.claimed is not None:
            await dead_letter_outcome(self._log, delivery.claimed, error, read=error.read)
            await self._effects.release(delivery.claimed)
        if delivery.record is not None:
            await dead_letter_message(
                self._log,
                delivery.consumer.name,
                delivery.record,
                error,
                brought_by=delivery.brought_by,
                pauses=True,
                read=error.read,
            )


def _failure_of(delivery: Delivery, error: Exception) -> Delivery | None:
    """Return an outcome that the log cannot hold as a failure of its effect, so that who waits for it is
    answered. User code and repositories decide what an outcome holds, and would hold their run or their
    workspace by it. Returns None for an event, and for a failure."""
    claimed = delivery.claimed
    if claimed is None or isinstance(delivery.message, Failed):
        return None
    logger.error("%s failed: %s", claimed.effect.type, error)
    message = plain(f"its result cannot be recorded: {error}")
    failed = Failed(claimed.effect, FailureCategory.INTERNAL, message)
    return replace(delivery, message=failed, artifacts=())


def _others_then(culprit: Delivery, deliveries: Sequence[Delivery]) -> Sequence[Sequence[Delivery]]:
    """Return the other deliveries together, and then the culprit."""
    return [[delivery for delivery in deliveries if delivery is not culprit], [culprit]]
