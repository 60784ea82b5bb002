"""Sessions: one sample's door to the policy, and the exact record of what went through it."""

import hmac
import secrets
import time
from dataclasses import dataclass, field

from schemas.sampling import Message, SampleRequest, Turn
from schemas.specs import GroupSpec

MOST_TURNS = 256
"""Model calls one sample may make."""


class GatewayError(Exception):
    """A request is refused; the answer is OpenAI's error object with this status and code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


@dataclass(slots=True)
class GatewaySession:
    """`infra.ports.Session`: usable until closed, past its deadline, or out of budget."""

    spec: GroupSpec
    index: int
    base_url: str
    api_key: str
    ends_at: float
    closed: bool = False
    turns: list[Turn] = field(default_factory=list)
    said: list[tuple[Message, ...]] = field(default_factory=list)
    pending: int = 0

    def close(self) -> tuple[tuple[Turn, ...], tuple[Message, ...]]:
        self.closed = True
        return tuple(self.turns), self.conversation

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The last conversation, with the policy's reply."""
        return self._whole(len(self.turns) - 1) if self.turns else ()

    def authorize(self, key: str) -> None:
        """Raises GatewayError unless this key may still ask."""
        if not hmac.compare_digest(key.encode(), self.api_key.encode()):
            raise GatewayError(401, "invalid_api_key", "this key is not this sample's key")
        if self.closed or time.monotonic() > self.ends_at:
            raise GatewayError(408, "deadline_exceeded", "this sample's time is over")
        if len(self.turns) + self.pending >= MOST_TURNS:
            raise GatewayError(
                400, "budget_exceeded", f"a sample may ask the policy {MOST_TURNS} times"
            )

    def request(self, messages: tuple[Message, ...], *, max_tokens: int | None) -> SampleRequest:
        """The next request: it continues the newest turn that its conversation extends."""
        template = self.spec.template
        params = template.params
        if max_tokens is not None and max_tokens < params.max_new_tokens:
            params = params.model_copy(update={"max_new_tokens": max_tokens})
        extended = next(
            (
                n
                for n in reversed(range(len(self.turns)))
                if messages[: len(self.said[n]) + 1] == self._whole(n)
            ),
            None,
        )
        return SampleRequest(
            model=template.model,
            policy=template.policy,
            tuning=template.tuning,
            lora_alpha=template.lora_alpha,
            params=params,
            key=self.spec.draw_key(self.index),
            messages=messages,
            history=self._history(extended),
            history_messages=self.said[extended] if extended is not None else (),
        )

    def record(self, messages: tuple[Message, ...], turn: Turn) -> None:
        """A turn happened. After `close` it is no longer part of the sample."""
        if not self.closed:
            self.turns.append(turn)
            self.said.append(messages)

    def _history(self, extended: int | None) -> tuple[Turn, ...]:
        """All turns, the one that is continued last: the engine counts over them how often this
        prompt was asked before, so that asking twice draws twice."""
        if extended is None:
            return tuple(self.turns)
        others = (turn for number, turn in enumerate(self.turns) if number != extended)
        return (*others, self.turns[extended])

    def _whole(self, number: int) -> tuple[Message, ...]:
        reply = Message(role="assistant", content=self.turns[number].text)
        return (*self.said[number], reply)


def new_key() -> str:
    """An API key of one sample."""
    return "hr-" + secrets.token_urlsafe(24)
