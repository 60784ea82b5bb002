"""Dead letters: show one with everything that was kept, and deliver it again."""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID

from infra.readmodel.dead_letters import SHORTEST_REF, LetterJson
from infra.spine.ports.artifacts import Artifacts
from infra.spine.ports.event_log import EventStore, Recorded
from schemas.errors import Conflict, InvalidConfig, NotFound
from schemas.events import MessageDeadLettered, MessageRedriven
from schemas.ids import dead_letter_stream, derive_id


class LetterFinder(Protocol):
    """Finds dead letters in the read model (`infra.readmodel.dead_letters.DeadLetterRows`)."""

    async def find_letters(self, ref: str) -> list[LetterJson]: ...


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter with everything that was kept. `data` are the message's bytes."""

    id: UUID
    event: MessageDeadLettered
    at: datetime
    data: bytes
    redriven_at: datetime | None


class DeadLetters:
    """Finds dead letters and delivers them again. All methods raise NotFound. An id may be shortened
    as long as it is unambiguous."""

    def __init__(self, log: EventStore, letters: LetterFinder, artifacts: Artifacts) -> None:
        self._log = log
        self._letters = letters
        self._artifacts = artifacts

    async def show(self, ref: str) -> Letter:
        """The letter with this id, with the bytes of its message."""
        row, recorded, event = await self._find(ref)
        content = event.content
        data = await self._artifacts.get_artifact(content) if content else event.payload.encode()
        return Letter(recorded.id, event, recorded.time, data, row["redriven_at"])

    async def redrive(self, ref: str) -> Recorded:
        """Deliver a dead letter again, only to the consumer that failed on it. Its run continues. Two
        requests have the same effect as one. Raises Conflict when it was delivered again before, or when
        there is nothing to deliver."""
        row, recorded, event = await self._find(ref)
        if row["redriven_at"] is not None:
            raise Conflict(
                f"dead letter {recorded.id} was already delivered again; if its consumer failed on "
                "it again, "
                "that is another dead letter, which `headrace dlq list` shows"
            )
        if not event.message_stream:
            raise Conflict(
                f"dead letter {recorded.id} was never an event of this log ({event.cause}), so it "
                "cannot "
                "be delivered; leave it as it is"
            )
        is_event = event.message_version > 0  # else an outcome, whose effect is performed again
        if is_event and not await self._log.events_at(
            [(event.message_stream, event.message_version)]
        ):
            raise Conflict(
                f"the message of dead letter {recorded.id} is not in the log, because {event.about} was "
                "archived or deleted; `headrace train restore RUN` brings back an archived run"
            )
        again = MessageRedriven(
            consumer=event.consumer,
            letter=recorded.id,
            message_id=event.message_id,
            message_stream=event.message_stream,
            message_version=event.message_version,
            about=event.about,
            paused=event.pauses,
        )
        cause = derive_id(recorded.id, "redrive")
        [appended] = await self._log.append([again], cause=cause, traceparent=event.traceparent)
        return appended

    async def _find(self, ref: str) -> tuple[LetterJson, Recorded, MessageDeadLettered]:
        found = await self._letters.find_letters(ref)
        if len(found) > 1:
            raise InvalidConfig(
                f"more than one dead letter begins with {ref!r}; give more characters of its id"
            )
        if not found:
            raise NotFound(
                f"there is no dead letter {ref!r}; `headrace dlq list` shows all (give at least "
                f"{SHORTEST_REF} characters of an id)"
            )
        [row] = found
        stream = dead_letter_stream(row["consumer"])
        for recorded in await self._log.events_at([(stream, row["version"])]):
            if isinstance(recorded.event, MessageDeadLettered):
                return row, recorded, recorded.event
        raise NotFound(
            f"dead letter {ref!r} is in the read model and not in the log; check that both are of one "
            "database"
        )
