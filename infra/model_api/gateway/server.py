"""The gateway's HTTP server: the one way from a request to a sampler. It speaks the wire formats of
`infra/model_api/wire/`.

POST /v1/samples/<sample>/chat/completions     user code, with that sample's key, on a unix socket
GET  /v1/samples/<sample>/models               the one model that it has
POST /internal/sample                          the API's checkpoint chat, on 127.0.0.1
POST /internal/serve                           calls to deployments (`infra/model_api/serving/`)

It runs inside the worker. A unix socket belongs to one run. Through it, only samples of that run are
reachable. The gateway of a process that serves deployments has no samples and no chats.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infra.http.checked_addresses import Resolve, resolve
from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from infra.http.socket_directory import SocketDirectory
from infra.http.token_bucket import TokenBucket
from infra.model_api.gateway.bodies import LargeBodyTurns, Receive, RequestBody, Scope, key_of
from infra.model_api.gateway.bytes_in_flight import BytesInFlight
from infra.model_api.gateway.delivery import (
    EventStream,
    Pieces,
    refuse,
    reply,
    sample_while_connected,
)
from infra.model_api.gateway.engine_errors import as_gateway_errors, gather_all
from infra.model_api.gateway.sandbox_protocol import SandboxProtocol
from infra.model_api.gateway.sessions import AdmittedRequest, GatewaySession, new_key
from infra.model_api.gateway.tunnels import Tunnels
from infra.model_api.wire.errors import GatewayError, no_token_count
from infra.model_api.wire.formats import FORMATS, MODELS, format_of, models, path_of
from infra.model_api.wire.request import ModelRequest, WireFormat, WireRequest
from infra.settings.network_policy import NO_NETWORK, NetworkPolicy
from schemas.ids import sample_id
from schemas.sampling import Sampler, SampleRequest, StreamingSampler, Tell, TokenCounter, Turn
from schemas.secrets.masking import NO_MASKS, Masks
from schemas.specs import GroupSpec

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Admit = Callable[[Scope, RequestBody, AsyncExitStack], Awaitable[AdmittedRequest | bytes]]
"""Checks, reads and parses a request. Returns what is to be sampled, or an answer for which nothing is.
The stack is closed once the request is answered. Raises GatewayError."""

LIMITS = ConnectionLimits(head_s=10, body_s=30, body_rate=1 << 20)
KEEP_ALIVE_S = 120.0

KEPT_SESSIONS = 4096
"""When there are more sessions than this, closed ones are forgotten. Late callers then get 404 instead
of 408."""
MOST_CONNECTIONS = 1024
REFUSED_PER_S, REFUSED_AT_ONCE, MOST_WAITING_REFUSALS = 64, 256, 256
"""How many bad requests of one socket are answered per second, how many at once after a pause, and how
many wait for that. The connections of further ones are closed after the answer."""

MOST_REDEEMING = 2
"""How many keys of chats are looked up at the same time."""

PREFIX = "/v1/samples/"
INTERNAL = "/internal/sample"


class HttpGateway:
    """`infra.ports.services.Gateway` and `GatewaySockets`."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        limits: ConnectionLimits = LIMITS,
        group: int | None = None,
        network: NetworkPolicy = NO_NETWORK,
        resolve: Resolve = resolve,
        redeem: Callable[[str], Awaitable[bool]] | None = None,
        deployments: Admit | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        keep_alive_s: float = KEEP_ALIVE_S,
        graceful_s: int = 1,
    ) -> None:
        """`group` is the group of user code, if it is not ours. Its processes may connect to sockets.
        `network` is the operator's policy for addresses that user code connects to. `redeem` uses up the
        key of a chat, and returns whether it was one. Without it there are no chats. `deployments`
        admits the requests to `host` and `port` in place of chats. Then there are no sockets."""
        self._sampler = sampler
        self._limits = limits
        self._group = group
        self._network = network
        self._resolve = resolve
        self._directory: SocketDirectory | None = None
        self._bodies = LargeBodyTurns()
        self._in_flight = BytesInFlight()
        self._sessions: dict[str, GatewaySession] = {}
        self._internal: Admit = deployments or self._chat
        self._has_sockets = deployments is None
        self._host = host
        self._server = HttpServer(
            self._app,
            host=host,
            port=port,
            limits=limits,
            keep_alive_s=keep_alive_s,
            graceful_s=graceful_s,
        )
        self._task: asyncio.Task[None] | None = None
        self._redeem = redeem
        self._redeeming = asyncio.Semaphore(MOST_REDEEMING)

    @property
    def url(self) -> str:
        """Where it listens, without a path. Available after `start`."""
        return f"http://{self._host}:{self._server.port}"

    @property
    def internal_url(self) -> str:
        return f"{self.url}{INTERNAL}"

    def open(
        self, spec: GroupSpec, index: int, *, deadline_s: float, masks: Masks = NO_MASKS
    ) -> GatewaySession:
        sample = sample_id(spec.group_key.id, index)
        session = GatewaySession(
            spec=spec,
            index=index,
            base_path=f"{PREFIX}{sample}",
            api_key=new_key(),
            deadline_s=deadline_s,
            masks=masks,
        )
        if len(self._sessions) > KEPT_SESSIONS:
            self._sessions = {k: s for k, s in self._sessions.items() if not s.closed}
        self._sessions[sample] = session
        return session

    async def open_socket(self, run: str, *, network: Sequence[str] = ()) -> Path:
        """Open a unix socket through which only samples of this run or evaluation are reachable."""
        assert self._directory is not None  # noqa: S101 - the gateway has started
        path = self._directory.new_path()
        tunnels = Tunnels(self._network.reachable(network), resolve=self._resolve)
        self._server.listen_unix(
            path,
            state={"run": run, "tunnels": tunnels, "refusals": _refusals()},
            connections=connections_of_a_socket(self._limits),
            group=self._group,
            protocol=SandboxProtocol,
        )
        return path

    @property
    def socket_directory(self) -> Path | None:
        """The directory of its sockets, once it has started."""
        return self._directory.path if self._directory else None

    def num_connections(self, path: Path) -> int:
        """How many connections a socket has now."""
        return self._server.num_connections(path)

    async def close_socket(self, path: Path) -> None:
        """Close a socket with all its connections."""
        self._server.close_unix(path)

    async def start(self) -> None:
        """Listen, and return once requests are accepted. Raises InvalidConfig when it cannot listen."""
        await self._server.listen()
        if self._has_sockets:  # this also removes the directories of killed processes
            self._directory = SocketDirectory(group=self._group)
        self._task = asyncio.ensure_future(self._server.serve())

    async def aclose(self) -> None:
        if self._task is not None:
            self._server.stop()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = RequestBody(scope, receive, self._bodies)
        try:
            async with AsyncExitStack() as held:
                admitted = await self._admit(scope, body, held)
                if isinstance(admitted, bytes):
                    await reply(send, 200, admitted)
                else:
                    await self._answer(admitted, body, send)
        except GatewayError as error:
            await refuse(send, body, error, failure=format_of(_place(scope)[1]).failure)

    async def _answer(self, admitted: AdmittedRequest, body: RequestBody, send: Send) -> None:
        """Sample the answers of a request, and deliver them: at the end, or as they are sampled."""
        request, number, wanted = admitted.request, admitted.number, admitted.wanted
        if request.streams:
            pieces = Pieces()
            work = admitted.record(partial(self._sample_all, wanted, pieces))
            stream = EventStream(send, request.stream(number=number))
            await stream.deliver(work, pieces, body.wait_for_disconnect)
            return
        work = admitted.record(partial(self._sample_all, wanted))
        turns = await sample_while_connected(work, body.wait_for_disconnect)
        await reply(send, 200, request.answer(turns, number=number))

    async def _sample_all(
        self, wanted: Sequence[SampleRequest], pieces: Pieces | None = None
    ) -> Sequence[Turn]:
        samples = [
            self._sample(request, partial(pieces.add, choice) if pieces else None)
            for choice, request in enumerate(wanted)
        ]
        return await gather_all(samples)

    async def _sample(self, request: SampleRequest, tell: Tell | None) -> Turn:
        sampler = self._sampler
        if tell is not None and isinstance(sampler, StreamingSampler):
            return await sampler.stream(request, tell)
        return await sampler.sample(request)

    async def _admit(
        self, scope: Scope, body: RequestBody, held: AsyncExitStack
    ) -> AdmittedRequest | bytes:
        """Admit a request of user code, or one to `host` and `port`."""
        if "run" not in scope["state"]:
            return await self._internal(scope, body, held)
        try:
            session = self._session(scope)
            session.authorize(key_of(scope))
            if scope["method"] == "GET":
                return models()
            wire, request = await self._receive(scope, body, session, held)
            if wire.count is not None:
                return wire.count(await self._count(session, request.model_request))
            return session.admit(request)
        except GatewayError as error:
            error.is_final = not await scope["state"]["refusals"].take()
            raise

    async def _receive(
        self, scope: Scope, body: RequestBody, session: GatewaySession, held: AsyncExitStack
    ) -> tuple[WireFormat, WireRequest]:
        """Wait until there is room for the body, read it, and parse it in the format of its path. Raises
        GatewayError."""
        wire = FORMATS[_place(scope)[1]]
        room = self._in_flight.wait_for_room(session.spec.owner, body.announced_length)
        with session.receiving():
            counted = await session.in_time(held.enter_async_context(room))
            data = await session.in_time(body.read(session.spec.owner, budget=session))
            counted.take(len(data))
            request = wire.parse(data)
        session.authorize(session.api_key)  # the deadline may have passed while the body was read
        return wire, request

    async def _count(self, session: GatewaySession, wanted: ModelRequest) -> int:
        """Count the tokens of a prompt. Raises GatewayError."""
        if not isinstance(self._sampler, TokenCounter):
            raise no_token_count()
        counting = self._sampler.count_prompt_tokens(session.preview(wanted))
        return await session.in_time(as_gateway_errors(counting))

    def _session(self, scope: Scope) -> GatewaySession:
        sample, path = _place(scope)
        known = path in FORMATS if scope["method"] == "POST" else path == MODELS
        if scope["method"] not in ("GET", "POST") or not known:
            raise _not_found(scope, ", ".join(f"{PREFIX}SAMPLE{each}" for each in FORMATS))
        session = self._sessions.get(sample)
        if session is None or session.spec.owner != scope["state"]["run"]:
            raise GatewayError(
                404,
                "unknown_sample",
                "this worker has no such sample of this run; use the base URL that the workflow was "
                "given",
            )
        return session

    async def _chat(self, scope: Scope, body: RequestBody, held: AsyncExitStack) -> bytes:
        """Answer a chat with a checkpoint. Raises GatewayError."""
        await held.enter_async_context(self._in_flight.wait_for_room("", body.announced_length))
        if scope["method"] != "POST" or scope["path"] != INTERNAL:
            raise _not_found(scope, INTERNAL)
        key = key_of(scope)
        async with (
            self._redeeming
        ):  # a stranger's keys must not take all connections to the database
            is_granted = self._redeem is not None and await self._redeem(key)
        if not is_granted:
            raise GatewayError(
                401, "invalid_api_key", "this key is not one for a chat; get a new one"
            )
        try:
            request = SampleRequest.model_validate_json(await body.read(""))
        except ValidationError as error:
            raise GatewayError(400, "invalid_request", str(error)) from error
        turn = await as_gateway_errors(self._sampler.sample(request))
        return bytes(turn.model_dump_json(), "utf-8")


def _not_found(scope: Scope, known: str) -> GatewayError:
    path = str(scope["path"])[:256]
    text = f"{scope['method']} {path} does not exist; send POST to {known}"
    return GatewayError(404, "not_found", text)


def _refusals() -> TokenBucket:
    """The pace at which one socket gets refusals, so that a flood of bad requests does not take the
    worker's time from other runs."""
    return TokenBucket(
        per_s=REFUSED_PER_S, burst=REFUSED_AT_ONCE, most_waiting=MOST_WAITING_REFUSALS
    )


def connections_of_a_socket(limits: ConnectionLimits) -> int:
    """How many connections one socket may have: a quarter of all, at most MOST_CONNECTIONS."""
    return max(8, min(MOST_CONNECTIONS, limits.max_connections() // 4))


def _place(scope: Scope) -> tuple[str, str]:
    """The sample of a path, and the rest of the path behind it; ("", "") if the path has none."""
    path: str = scope["path"]
    if not path.startswith(PREFIX):
        return "", ""
    sample, slash, rest = path[len(PREFIX) :].partition("/")
    return sample, path_of(slash + rest)
