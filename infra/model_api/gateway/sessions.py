"""Sessions: a sample's access to the policy, and the exact record of its model calls."""

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from headrace.turn_rewards import MOST_TURNS
from infra.model_api.gateway.call_ids import with_unique_ids
from infra.model_api.gateway.engine_errors import as_gateway_errors
from infra.model_api.gateway.histories import Histories, prompt_key
from infra.model_api.wire.errors import GatewayError
from infra.model_api.wire.request import ModelRequest, WireRequest
from schemas.errors import FailureCategory, SamplerBusy
from schemas.sampling import (
    Message,
    SampleFailure,
    SampleRequest,
    SamplingParams,
    ToolSpec,
    Turn,
)
from schemas.secrets.masking import NO_MASKS, Masks
from schemas.specs import GroupSpec

T = TypeVar("T")
Sampling = Callable[[], Awaitable[Sequence[Turn]]]
"""Samples all answers of a request together. Raises the errors of the engine."""

MOST_BYTES = 64 << 20
"""How many bytes the bodies of all requests of one sample may have. Its conversations stay in memory
until it ends."""

ENGINE_REFUSALS = frozenset(
    {
        FailureCategory.PROVIDER,
        FailureCategory.BUDGET,
        FailureCategory.INTERNAL,
        FailureCategory.PROMPT_TOO_LONG,
    }
)
"""The refusals of an engine that explain why a workflow raises. All others are about one request of the
workflow, which may handle them."""


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that a session has admitted, and what the engine is asked for: one request for each
    answer. `record` samples within the limits of the session, and returns the turns as the client gets
    them. A sample's session keeps them, and that of a deployment does not. Raises GatewayError."""

    request: WireRequest
    number: int
    wanted: Sequence[SampleRequest]
    record: Callable[[Sampling], Awaitable[Sequence[Turn]]]


@dataclass(slots=True, eq=False)
class ModelCall:
    """One request for one answer, the `number`-th of its sample (from 1). `turn` is set once it is
    answered. A refused request still counts, but its messages are dropped. `extended` is the call whose
    conversation it continues. The first `num_instructions` messages are instructions that hold for this
    request only."""

    number: int
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    extended: "ModelCall | None" = None
    num_instructions: int = 0
    prompt: bytes = b""
    """Its `prompt_key`."""
    turn: Turn | None = None
    refused: bool = False
    is_continued: bool = False
    """Whether a later turn has its exact tokens in its prompt."""

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages of the request, followed by the reply."""
        reply = self.turn.message if self.turn else Message(role="assistant", content="")
        return (*self.messages, reply)


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
    waits_for_sampler: bool = False
    refusal: SampleFailure | None = None
    being_received: int = 0
    received_bytes: int = 0
    num_tokens: int = 0
    """Tokens of all answered calls. Tokens that a call shares with the one that it continues count
    once."""
    num_generated: int = 0
    """Tokens of all answers."""
    tools: tuple[ToolSpec, ...] = ()
    """Once it is closed: the tools that the last answered request offered."""
    offered: tuple[tuple[ToolSpec, ...], ...] = ()
    """Once it is closed: the tools that each answered request offered."""
    branches: tuple[tuple[Message, ...], ...] = ()
    """Once it is closed: the conversations that no answered request continues, in the order of their
    requests."""
    calls: list[ModelCall] = field(default_factory=list)
    histories: Histories[ModelCall] = field(default_factory=Histories)
    call_ids: set[str] = field(default_factory=set)

    def close(self) -> tuple[tuple[Turn, ...], tuple[Message, ...]]:
        self.closed = True
        answered = self._answered_calls()
        turns = tuple(one.turn for one in answered if one.turn is not None)
        self.calls, self.histories = [], Histories()  # a closed session may be kept for a while
        if not answered:
            return (), ()
        self.tools = answered[-1].tools
        self.offered = tuple(one.tools for one in answered)
        continued = {id(one.extended) for one in answered}
        self.branches = tuple(one.conversation for one in answered if id(one) not in continued)
        return turns, answered[-1].conversation

    def left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        spent = 0.0 if self.began is None else time.monotonic() - self.began
        return self.deadline_s - spent

    async def in_time(self, work: Awaitable[T]) -> T:
        """Await `work` and return its result. Raises GatewayError (408) at the deadline."""
        try:
            async with asyncio.timeout(max(0.0, self.left_s())):
                return await work
        except TimeoutError as error:
            raise _too_late() from error

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
            raise _too_late()
        if len(self.calls) >= MOST_TURNS:
            raise _too_many_calls()

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

    def admit(self, request: WireRequest) -> AdmittedRequest:
        """Record a request. Raises GatewayError at a limit of the sample."""
        calls, wanted = zip(*self.ask(request.model_request), strict=True)
        return AdmittedRequest(request, calls[0].number, wanted, partial(self._record, calls))

    async def _record(self, calls: Sequence[ModelCall], sample: Sampling) -> Sequence[Turn]:
        """Sample the answers of these calls in time, and record them all, or none."""
        try:
            turns = await self.in_time(as_gateway_errors(sample()))
        except BaseException as error:  # a disconnected client cancels this
            refused = error if isinstance(error, GatewayError) else None
            for call in calls:
                self.refuse(call, refused)
            # A failure of the platform says nothing about the sample, which will run again.
            self.interrupted |= refused is not None and refused.status >= 500
            self.waits_for_sampler |= isinstance(error.__cause__, SamplerBusy)
            raise
        return [self.answer(call, turn) for call, turn in zip(calls, turns, strict=True)]

    def ask(self, wanted: ModelRequest) -> list[tuple[ModelCall, SampleRequest]]:
        """Record a request. Returns, for each choice that it asks for, its record and the request to the
        engine, which continues the turn that the conversation extends. The stop strings of a request are
        added to the run's own. Requests with equal prompts are numbered as they arrive, whatever becomes
        of them, so no two of them draw the same tokens, and other requests do not change what they draw.
        Raises GatewayError at a limit of the sample."""
        params = self._limited_params(wanted)
        call, request = self._prepare(wanted, params)
        asked = []
        for _ in range(wanted.num_choices):
            occurrence = sum(one.prompt == call.prompt for one in self.calls)
            recorded = replace(call, number=len(self.calls) + 1)
            self.calls.append(recorded)
            asked.append((recorded, request.model_copy(update={"occurrence": occurrence})))
        return asked

    def preview(self, wanted: ModelRequest) -> SampleRequest:
        """Return the request to the engine without recording it, to count its tokens."""
        return self._prepare(wanted, self.spec.template.params)[1]

    def _prepare(
        self, wanted: ModelRequest, params: SamplingParams
    ) -> tuple[ModelCall, SampleRequest]:
        """Return a request as it would be recorded, and as the engine would get it."""
        wanted = wanted.mask(self.masks)
        whole, num_instructions = self._whole_conversation(wanted)
        extended, messages, tools = self.histories.find_history(whole, wanted.tools)
        template = self.spec.template
        request = SampleRequest(
            model=template.model,
            policy=template.policy,
            tuning=template.tuning,
            lora_alpha=template.lora_alpha,
            lora_scaling=template.lora_scaling,
            params=params,
            key=self.spec.draw_key(self.index),
            messages=messages,
            tools=tools,
            history=(extended.turn,) if extended is not None and extended.turn is not None else (),
            history_messages=extended.messages if extended is not None else (),
            pieces=wanted.pieces,
            likeliest=wanted.likeliest,
            constraint=wanted.constraint,
            avoid=template.avoid,
        )
        prompt = prompt_key(messages, tools)
        return ModelCall(0, messages, tools, extended, num_instructions, prompt), request

    def _limited_params(self, wanted: ModelRequest) -> SamplingParams:
        """Return how the tokens of a request are drawn. Raises GatewayError at a limit of the sample."""
        params, rollout = self.spec.template.params, self.spec.template.rollout
        new_tokens = [params.max_new_tokens, *([wanted.max_tokens] if wanted.max_tokens else [])]
        most_turns = rollout.max_turns if rollout else None
        made = sum(not one.refused for one in self.calls)
        if most_turns is not None and made + wanted.num_choices > most_turns:
            raise GatewayError(
                400,
                "max_turns_exceeded",
                f"the sample has made {made} of at most {most_turns} turns (advanced.max_turns); end "
                "the attempt with what it has",
            )
        if len(self.calls) + wanted.num_choices > MOST_TURNS:
            raise _too_many_calls()
        new_tokens += self._tokens_left()
        stop = (*params.stop, *(self.masks.text(one) for one in wanted.stop))
        return params.model_copy(update={"max_new_tokens": min(new_tokens), "stop": stop})

    def _tokens_left(self) -> Iterator[int]:
        """Yield how many tokens the limits of the sample leave for an answer. Requests that are open at
        the same time each get what is left. Raises GatewayError when nothing is left."""
        rollout = self.spec.template.rollout
        if rollout is None:
            return
        limits = (
            ("max_sample_tokens", rollout.max_sample_tokens, self.num_tokens, "has"),
            ("max_response_length", rollout.max_response_tokens, self.num_generated, "generated"),
        )
        for key, most, used, verb in limits:
            if most is None:
                continue
            if used >= most:
                raise GatewayError(
                    400,
                    f"{key}_exceeded",
                    f"the sample {verb} {used} tokens, and at most {most} are allowed ({key}); end the "
                    f"attempt with what it has, raise {key}, or lower max_answer_length, so that an "
                    "answer leaves tokens for the next ones",
                )
            yield most - used

    def _whole_conversation(self, wanted: ModelRequest) -> tuple[tuple[Message, ...], int]:
        """Return the messages of a request with its instructions and the conversation that it continues,
        and how many of them are instructions. Raises GatewayError when there is no such conversation."""
        instructions = wanted.instructions
        first = (Message(role="system", content=instructions),) if instructions else ()
        before: tuple[Message, ...] = ()
        if wanted.previous is not None:
            known = 0 < wanted.previous <= len(self.calls)
            call = self.calls[wanted.previous - 1] if known else None
            if call is None or call.turn is None:
                raise GatewayError(
                    400,
                    "unknown_response",
                    "previous_response_id: this sample has no such response; send the whole input",
                    parameter="previous_response_id",
                )
            before = call.conversation[call.num_instructions :]
        return (*first, *before, *wanted.messages), len(first)

    def refuse(self, call: ModelCall, error: GatewayError | None = None) -> None:
        """Mark a call as refused, and drop its messages. `error` is its answer, if there is one."""
        call.messages, call.refused = (), True
        if error is not None and error.category in ENGINE_REFUSALS:
            self.refusal = SampleFailure(category=error.category, message=error.message)

    def answer(self, call: ModelCall, turn: Turn) -> Turn:
        """Record the turn of a call, and return it as it is recorded, in which no id of a tool call is
        used twice. After `close` it is not recorded, because the sample is complete."""
        turn = with_unique_ids(turn, call.number, used=self.call_ids)
        if not self.closed:
            call.turn, self.refusal = turn, None
            self.num_tokens += _num_new_tokens(call, turn)
            self.num_generated += turn.counts.completion_tokens
            self.histories.add(call)
        return turn

    def _answered_calls(self) -> list[ModelCall]:
        """The answered calls, in the order of their requests."""
        return [one for one in self.calls if one.turn is not None]


def new_key() -> str:
    """A new random API key."""
    return "hr-" + secrets.token_urlsafe(24)


def _num_new_tokens(call: ModelCall, turn: Turn) -> int:
    """How many tokens a turn adds to its sample. If it continues a turn exactly, and as the first one,
    the two are one training row."""
    num_tokens = turn.counts.prompt_tokens + turn.counts.completion_tokens
    extended = call.extended
    if not turn.prompt_ids or extended is None or extended.turn is None or extended.is_continued:
        return num_tokens
    before = (*extended.turn.prompt_ids, *extended.turn.completion_ids)
    if turn.prompt_ids[: len(before)] != before:
        return num_tokens
    extended.is_continued = True
    return num_tokens - len(before)


def _too_late() -> GatewayError:
    return GatewayError(408, "deadline_exceeded", "the time limit of this sample has passed")


def _too_many_calls() -> GatewayError:
    return GatewayError(
        400, "budget_exceeded", f"a sample may make at most {MOST_TURNS} model calls"
    )
