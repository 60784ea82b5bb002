"""Sessions: one sample's door to the policy, and the exact record of what went through it."""

import hmac
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from schemas.sampling import Message, SampleRequest, Turn
from schemas.specs import GroupSpec

MOST_TURNS = 256
"""Model calls one sample may make."""


class GatewayError(Exception):
    """A request is refused; the answer is OpenAI's error object with this status and code."""

    def __init__(
        self, status: int, code: str, message: str, *, parameter: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.parameter = parameter
        self.code = code
        self.message = message


@dataclass(slots=True)
class Asked:
    """One request of a sample, in the order they came; `turn` once it is answered. One that was refused
    counts, and its messages are let go."""

    messages: tuple[Message, ...]
    turn: Turn | None = None
    refused: bool = False

    @property
    def waits(self) -> bool:
        """Whether it is still open."""
        return self.turn is None and not self.refused

    @property
    def whole(self) -> tuple[Message, ...]:
        """The conversation with the reply."""
        text = self.turn.text if self.turn else ""
        return (*self.messages, Message(role="assistant", content=text))


@dataclass(slots=True)
class GatewaySession:
    """`infra.ports.services.Session`: usable until closed, past its deadline, or out of budget. Its time
    begins with its first request: before, a process for the workflow may have had to start."""

    spec: GroupSpec
    index: int
    base_url: str
    api_key: str
    deadline_s: float
    began: float | None = None
    closed: bool = False
    interrupted: bool = False
    being_received: int = 0
    asked: list[Asked] = field(default_factory=list)

    def close(self) -> tuple[tuple[Turn, ...], tuple[Message, ...]]:
        self.closed = True
        answered = self._answered()
        turns = tuple(one.turn for one in answered if one.turn is not None)
        return turns, answered[-1].whole if answered else ()

    def left_s(self) -> float:
        """Seconds until its time is over."""
        spent = 0.0 if self.began is None else time.monotonic() - self.began
        return self.deadline_s - spent

    def authorize(self, key: str) -> None:
        """Raises GatewayError unless this key may still ask."""
        if not hmac.compare_digest(key.encode(), self.api_key.encode()):
            raise GatewayError(401, "invalid_api_key", "this key is not this sample's key")
        if self.began is None:
            self.began = time.monotonic()
        if self.closed or self.left_s() < 0:
            raise GatewayError(408, "deadline_exceeded", "this sample's time is over")
        if len(self.asked) >= MOST_TURNS:
            raise GatewayError(
                400, "budget_exceeded", f"a sample may ask the policy {MOST_TURNS} times"
            )

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While the body of a request is read. Raises GatewayError (429) when this key's requests are
        too many."""
        if self.being_received >= MOST_TURNS:
            raise GatewayError(
                429, "too_many_requests", f"a sample may send {MOST_TURNS} requests at once"
            )
        self.being_received += 1
        try:
            yield
        finally:
            self.being_received -= 1

    def ask(
        self,
        messages: tuple[Message, ...],
        *,
        max_tokens: int | None,
        stop: tuple[str, ...] = (),
        pieces: bool = False,
    ) -> tuple[Asked, SampleRequest]:
        """Note a request, and what to ask the engine: it continues the newest answered turn that its
        conversation extends. `stop` are stop strings beside the run's own; `pieces`: the bytes of each
        token are wanted. Requests of equal messages that are still open count as asked before, so that
        asking many times at once draws many times."""
        template = self.spec.template
        params = template.params
        if max_tokens is not None and max_tokens < params.max_new_tokens:
            params = params.model_copy(update={"max_new_tokens": max_tokens})
        if stop:
            params = params.model_copy(update={"stop": (*params.stop, *stop)})
        answered = self._answered()
        extended = next(
            (one for one in reversed(answered) if messages[: len(one.whole)] == one.whole), None
        )
        others = [one for one in answered if one is not extended]
        history = [*others, extended] if extended is not None else others
        waiting = sum(one.waits and one.messages == messages for one in self.asked)
        request = SampleRequest(
            model=template.model,
            policy=template.policy,
            tuning=template.tuning,
            lora_alpha=template.lora_alpha,
            params=params,
            key=self.spec.draw_key(self.index),
            messages=messages,
            history=tuple(one.turn for one in history if one.turn is not None),
            history_messages=extended.messages if extended is not None else (),
            waiting=waiting,
            pieces=pieces,
        )
        noted = Asked(messages)
        self.asked.append(noted)
        return noted, request

    def refuse(self, noted: Asked) -> None:
        """A request was refused: it was asked, and that is all that is kept of it."""
        noted.messages, noted.refused = (), True

    def answer(self, noted: Asked, turn: Turn) -> None:
        """A turn happened. After `close` it is no longer part of the sample."""
        if not self.closed:
            noted.turn = turn

    def _answered(self) -> list[Asked]:
        """In the order they were asked, whichever was answered first."""
        return [one for one in self.asked if one.turn is not None]


def new_key() -> str:
    """An API key of one sample."""
    return "hr-" + secrets.token_urlsafe(24)
