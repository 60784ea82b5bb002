"""Sessions: a sample's access to the policy, and the exact record of its model calls."""

import hmac
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from schemas.sampling import Message, SampleRequest, Turn
from schemas.secrets.masking import NO_MASKS, Masks
from schemas.specs import GroupSpec

MOST_TURNS = 256
"""How many model calls one sample may make."""

MOST_BYTES = 64 << 20
"""How many bytes the bodies of all requests of one sample may have. Its conversations stay in memory
until it ends."""


class GatewayError(Exception):
    """A request was refused. The response is OpenAI's error object with this HTTP status and code."""

    def __init__(
        self, status: int, code: str, message: str, *, parameter: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.parameter = parameter
        self.code = code
        self.message = message
        self.is_final = False
        """Whether the connection is closed after the answer."""


@dataclass(slots=True)
class ModelCall:
    """One request of a sample. `turn` is set once it is answered. A refused request still counts, but
    its messages are dropped."""

    messages: tuple[Message, ...]
    turn: Turn | None = None
    refused: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it is neither answered nor refused."""
        return self.turn is None and not self.refused

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages of the request, followed by the reply."""
        text = self.turn.text if self.turn else ""
        return (*self.messages, Message(role="assistant", content=text))


@dataclass(slots=True)
class GatewaySession:
    """`infra.ports.services.Session`: usable until it is closed, past its deadline, or out of budget.
    Its time begins with its first request, because a process for the workflow may have to start
    before."""

    spec: GroupSpec
    index: int
    base_path: str
    api_key: str
    deadline_s: float
    masks: Masks = NO_MASKS
    began: float | None = None
    closed: bool = False
    interrupted: bool = False
    being_received: int = 0
    received_bytes: int = 0
    calls: list[ModelCall] = field(default_factory=list)

    def close(self) -> tuple[tuple[Turn, ...], tuple[Message, ...]]:
        self.closed = True
        answered = self._answered_calls()
        turns = tuple(one.turn for one in answered if one.turn is not None)
        return turns, answered[-1].conversation if answered else ()

    def mask(self, message: Message) -> Message:
        """Return a message of a request as it is sampled from and recorded."""
        if not self.masks:
            return message
        return message.model_copy(update={"content": self.masks.text(message.content)})

    def left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        spent = 0.0 if self.began is None else time.monotonic() - self.began
        return self.deadline_s - spent

    def authorize(self, key: str) -> None:
        """Raise GatewayError unless this key may still make calls. The first call with the right key
        starts the session's time."""
        if not hmac.compare_digest(key.encode(), self.api_key.encode()):
            raise GatewayError(
                401,
                "invalid_api_key",
                "the API key is not the key of this sample; use the key that the workflow was given",
            )
        if self.began is None:
            self.began = time.monotonic()
        if self.closed or self.left_s() < 0:
            raise GatewayError(408, "deadline_exceeded", "the time limit of this sample has passed")
        if len(self.calls) >= MOST_TURNS:
            raise GatewayError(
                400, "budget_exceeded", f"a sample may make at most {MOST_TURNS} model calls"
            )

    def count_received(self, num_bytes: int) -> None:
        """Count bytes of a body. Raises GatewayError (413) when the sample may not send them."""
        self.received_bytes += num_bytes
        self.check_room(0)

    def check_room(self, num_bytes: int) -> None:
        """Raise GatewayError (413) unless the sample may send this many bytes more."""
        if self.received_bytes + num_bytes > MOST_BYTES:
            raise GatewayError(
                413,
                "budget_exceeded",
                f"the requests of a sample may have at most {MOST_BYTES} bytes in all; send shorter "
                "conversations",
            )

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Count a request whose body is read inside the block. Raises GatewayError (429) when MOST_TURNS
        bodies are being read already."""
        if self.being_received >= MOST_TURNS:
            raise GatewayError(
                429,
                "too_many_requests",
                f"a sample may send at most {MOST_TURNS} requests at the same time",
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
    ) -> tuple[ModelCall, SampleRequest]:
        """Record a request. Returns its record and the request to the engine, which continues the newest
        answered turn that this conversation extends. `stop` are stop strings in addition to the run's
        own. `pieces` requests the bytes of each token. Open requests with equal messages count as
        earlier draws, so that several equal requests at the same time draw different samples."""
        template = self.spec.template
        params = template.params
        if max_tokens is not None and max_tokens < params.max_new_tokens:
            params = params.model_copy(update={"max_new_tokens": max_tokens})
        if stop:
            params = params.model_copy(update={"stop": (*params.stop, *stop)})
        answered = self._answered_calls()
        extended = next(
            (
                one
                for one in reversed(answered)
                if messages[: len(one.conversation)] == one.conversation
            ),
            None,
        )
        others = [one for one in answered if one is not extended]
        history = [*others, extended] if extended is not None else others
        waiting = sum(one.is_open and one.messages == messages for one in self.calls)
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
        call = ModelCall(messages)
        self.calls.append(call)
        return call, request

    def refuse(self, call: ModelCall) -> None:
        """Mark a call as refused, and drop its messages."""
        call.messages, call.refused = (), True

    def answer(self, call: ModelCall, turn: Turn) -> None:
        """Record the turn of a call. After `close` it is ignored, because the sample is complete."""
        if not self.closed:
            call.turn = turn

    def _answered_calls(self) -> list[ModelCall]:
        """The answered calls, in the order of their requests."""
        return [one for one in self.calls if one.turn is not None]


def new_key() -> str:
    """A new random API key."""
    return "hr-" + secrets.token_urlsafe(24)
