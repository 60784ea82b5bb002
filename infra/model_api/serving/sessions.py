"""Sessions of deployments: a call of a control process is a session of the gateway that keeps no turns.

Only control processes may call, each with a key of its own (`infra/model_api/serving/grants.py`).
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Protocol

from infra.http.limits import ConnectionLimits
from infra.model_api.gateway.bodies import RequestBody, Scope, key_of
from infra.model_api.gateway.bytes_in_flight import BytesInFlight
from infra.model_api.gateway.call_ids import with_unique_ids
from infra.model_api.gateway.engine_errors import as_gateway_errors
from infra.model_api.gateway.server import HttpGateway
from infra.model_api.gateway.sessions import AdmittedRequest, Sampling
from infra.model_api.serving.answer_memory import AnswerMemory, MemoryClaim, most_bytes
from infra.model_api.serving.call import PATH, ServingCall
from infra.model_api.serving.sample_requests import ServedRequest, parse_request, sample_requests
from infra.model_api.serving.turns import AnswerTurns
from infra.model_api.wire.errors import GatewayError
from schemas.errors import NotFound
from schemas.sampling import Sampler, Turn

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


class DeploymentSessions:
    """Admits calls of control processes. `look` is awaited before an answer, and once a second while
    answers are sampled (`keep_looking`). `most` returns how many calls are sampled at the same time;
    further ones wait."""

    def __init__(
        self,
        *,
        is_known: Callable[[str], Awaitable[bool]],
        usage: CountsUsage,
        look: Callable[[], Awaitable[None]] = look_at_nothing,
        most: Callable[[], int] = lambda: MOST_REQUESTS,
    ) -> None:
        self._is_known = is_known
        self._usage = usage
        self._look = look
        self._turns = AnswerTurns(most)
        self._in_flight = BytesInFlight()
        self._memory = AnswerMemory()
        self._num_requests = 0
        self._is_busy = asyncio.Event()
        self.is_ready = False
        """Whether the deployments are loaded. Until then calls are refused with 503."""

    async def keep_looking(self) -> None:
        """Look once a second while there are calls, until cancelled."""
        while True:
            await self._is_busy.wait()
            await self._look()
            await asyncio.sleep(WATCH_S)

    async def admit(self, scope: Scope, body: RequestBody, held: AsyncExitStack) -> AdmittedRequest:
        """`infra.model_api.gateway.server.Admit`, for calls of control processes."""
        if scope["method"] != "POST" or scope["path"] != PATH:
            raise GatewayError(404, "not_found", f"only POST {PATH} exists")
        if not await as_gateway_errors(self._is_known(key_of(scope))):
            raise GatewayError(401, "invalid_api_key", "the key is not one of a control process")
        if not self.is_ready:
            raise GatewayError(503, "not_ready", "the deployments are being loaded; try again")
        self._begin_request()
        held.callback(self._end_request)
        counted = held.enter_context(self._in_flight.hold())
        call, parsed = _parse(await body.read("", budget=counted))
        counted.belongs_to(call.api_key)
        await self._look()
        number, wanted = secrets.randbits(48), sample_requests(call, parsed)
        memory = self._memory.claim(call.api_key, call.served.workspace, most_bytes(wanted))
        record = partial(self._record, call, parsed, number, held.enter_context(memory))
        return AdmittedRequest(parsed, number, wanted, record)

    def _begin_request(self) -> None:
        if self._num_requests >= MOST_REQUESTS:
            text = f"{MOST_REQUESTS} requests are being answered; try again"
            raise GatewayError(429, "too_many_requests", text)
        self._num_requests += 1
        self._is_busy.set()

    def _end_request(self) -> None:
        self._num_requests -= 1
        if not self._num_requests:
            self._is_busy.clear()

    async def _record(
        self,
        call: ServingCall,
        parsed: ServedRequest,
        number: int,
        claim: MemoryClaim,
        sample: Sampling,
    ) -> Sequence[Turn]:
        """Sample the answers of a call once there is memory and a turn for them. Count their tokens, and
        keep nothing else."""
        await claim.wait()
        async with self._turns.turn():
            sampled = await as_gateway_errors(_vanished_as_gone(sample()))
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


def deployment_gateway(
    sampler: Sampler, sessions: DeploymentSessions, *, host: str = "127.0.0.1", port: int = 0
) -> HttpGateway:
    """The gateway of the process that serves. Control processes reach it at PATH."""
    return HttpGateway(
        sampler,
        deployments=sessions.admit,
        host=host,
        port=port,
        limits=LIMITS,
        keep_alive_s=KEEP_ALIVE_S,
        graceful_s=5,
    )


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
