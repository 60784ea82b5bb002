"""The HTTP server of the process that serves deployments. Only control processes may ask it, each with a
key of its own (`infra/model_api/serving/grants.py`).

It parses the body of a client and writes the answer with the code of the gateway
(`infra/model_api/wire/`), so a deployment answers as the endpoint of a sample does.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import Any, Protocol

from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from infra.model_api.gateway.bodies import LargeBodyTurns, Receive, RequestBody, Scope, key_of
from infra.model_api.gateway.bytes_in_flight import BytesInFlight
from infra.model_api.gateway.call_ids import with_unique_ids
from infra.model_api.gateway.delivery import (
    EventStream,
    Pieces,
    refuse,
    reply,
    sample_while_connected,
)
from infra.model_api.gateway.engine_errors import as_gateway_errors, gather_all
from infra.model_api.serving.answer_memory import AnswerMemory, MemoryClaim, most_bytes
from infra.model_api.serving.call import PATH, ServingCall
from infra.model_api.serving.sample_requests import ServedRequest, parse_request, sample_requests
from infra.model_api.serving.turns import AnswerTurns
from infra.model_api.wire.chat_completions import failure
from infra.model_api.wire.errors import GatewayError
from schemas.errors import NotFound
from schemas.sampling import Sampler, SampleRequest, StreamingSampler, Tell, Turn

logger = logging.getLogger(__name__)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LIMITS = ConnectionLimits(head_s=10, body_s=60, body_rate=1 << 20)
KEEP_ALIVE_S = 300.0
MOST_REQUESTS = 1024
"""How many requests are answered at the same time. Further ones are refused with 429."""
WATCH_S = 1.0


class CountsUsage(Protocol):
    """Counts what an API key used (`infra.model_api.serving.usage.UsageCounts`)."""

    def add(
        self, api_key: str, model: str, *, prompt_tokens: int, completion_tokens: int
    ) -> None: ...


async def look_at_nothing() -> None:
    """Stands for a watch where no run can train."""


class ServingEndpoint:
    """Answers calls of control processes with the engine of this process. `look` is awaited before an
    answer, and once a second while answers are sampled. `most` returns how many calls are sampled at the
    same time; further ones wait."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        is_known: Callable[[str], Awaitable[bool]],
        usage: CountsUsage,
        host: str = "127.0.0.1",
        port: int = 0,
        look: Callable[[], Awaitable[None]] = look_at_nothing,
        most: Callable[[], int] = lambda: MOST_REQUESTS,
    ) -> None:
        self._sampler = sampler
        self._is_known = is_known
        self._usage = usage
        self._look = look
        self._turns = AnswerTurns(most)
        self._bodies = LargeBodyTurns()
        self._in_flight = BytesInFlight()
        self._memory = AnswerMemory()
        self._server = HttpServer(
            self._app,
            host=host,
            port=port,
            limits=LIMITS,
            keep_alive_s=KEEP_ALIVE_S,
            graceful_s=5,
        )
        self._host = host
        self._num_requests = 0
        self._is_busy = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.is_ready = False
        """Whether the deployments are loaded. Until then calls are refused with 503."""

    @property
    def url(self) -> str:
        """Where control processes reach it. Available after `start`."""
        return f"http://{self._host}:{self._server.port}{PATH}"

    async def start(self) -> None:
        """Listen, and return once calls are accepted. Raises InvalidConfig when it cannot listen."""
        await self._server.listen()
        self._tasks = [
            asyncio.ensure_future(self._server.serve()),
            asyncio.ensure_future(self._keep_looking()),
        ]

    async def aclose(self) -> None:
        """Refuse new calls, and end those that are not over within a few seconds."""
        self._server.stop()
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_looking(self) -> None:
        while True:
            await self._is_busy.wait()
            await self._look()
            await asyncio.sleep(WATCH_S)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = RequestBody(scope, receive, self._bodies)
        try:
            await self._admit(scope, body, send)
        except GatewayError as error:
            await refuse(send, body, error, failure=failure)

    async def _admit(self, scope: Scope, body: RequestBody, send: Send) -> None:
        """Check the key of a call, and answer it. Raises GatewayError."""
        if scope["method"] != "POST" or scope["path"] != PATH:
            raise GatewayError(404, "not_found", f"only POST {PATH} exists")
        if not await as_gateway_errors(self._is_known(key_of(scope))):
            raise GatewayError(401, "invalid_api_key", "the key is not one of a control process")
        if not self.is_ready:
            raise GatewayError(503, "not_ready", "the deployments are being loaded; try again")
        if self._num_requests >= MOST_REQUESTS:
            text = f"{MOST_REQUESTS} requests are being answered; try again"
            raise GatewayError(429, "too_many_requests", text)
        self._num_requests += 1
        self._is_busy.set()
        try:
            with self._in_flight.hold() as held:
                call, parsed = _parse(await body.read("", budget=held))
                held.belongs_to(call.api_key)
                await self._look()
                await self._answer(call, parsed, body, send)
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._is_busy.clear()

    async def _answer(
        self, call: ServingCall, parsed: ServedRequest, body: RequestBody, send: Send
    ) -> None:
        number = secrets.randbits(48)
        wanted = sample_requests(call, parsed)
        with self._memory.claim(call.api_key, call.served.workspace, most_bytes(wanted)) as claim:
            if not parsed.streams:
                work = self._sample_all(call, parsed, wanted, number, claim)
                turns = await sample_while_connected(work, body.wait_for_disconnect)
                await reply(send, 200, parsed.answer(turns, number=number))
                return
            pieces = Pieces()
            work = self._sample_all(call, parsed, wanted, number, claim, pieces)
            stream = EventStream(send, parsed.stream(number=number))
            await stream.deliver(work, pieces, body.wait_for_disconnect)

    async def _sample_all(
        self,
        call: ServingCall,
        parsed: ServedRequest,
        wanted: Sequence[SampleRequest],
        number: int,
        claim: MemoryClaim,
        pieces: Pieces | None = None,
    ) -> Sequence[Turn]:
        """Sample the answers of a call together, once there is memory for them, and count their tokens.
        Their text is put into `pieces` as it is sampled. Raises GatewayError."""
        await claim.wait()
        async with self._turns.turn():
            samples = [
                self._sample(request, partial(pieces.add, choice) if pieces else None)
                for choice, request in enumerate(wanted)
            ]
            sampled = await as_gateway_errors(_vanished_as_gone(gather_all(samples)))
        used: set[str] = set()
        turns = [with_unique_ids(turn, number, used=used) for turn in sampled]
        prompts = turns[:: parsed.model_request.num_choices]
        self._usage.add(
            call.api_key,
            call.model,
            prompt_tokens=sum(turn.counts.prompt_tokens for turn in prompts),
            completion_tokens=sum(turn.counts.completion_tokens for turn in turns),
        )
        return turns

    async def _sample(self, request: SampleRequest, tell: Tell | None) -> Turn:
        sampler = self._sampler
        if tell is not None and isinstance(sampler, StreamingSampler):
            return await sampler.stream(request, tell)
        return await sampler.sample(request)


def _parse(data: bytes) -> tuple[ServingCall, ServedRequest]:
    """The call, and the request of the client. Raises GatewayError (400)."""
    call, body = ServingCall.unpack(data)
    return call, parse_request(call.wire, body)


async def _vanished_as_gone(work: Awaitable[Sequence[Turn]]) -> Sequence[Turn]:
    """Await the work of an engine. Raises GatewayError (410) when the weights do not exist any more."""
    try:
        return await work
    except NotFound as error:
        raise GatewayError(
            410, "weights_gone", f"{error.message}; deploy another checkpoint under this name"
        ) from error
