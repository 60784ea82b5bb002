"""The requests that a server has when it stops are answered, or may be sent again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from producers.http.app import AnswersAtTheEnd
from producers.serve import finish_requests


class Waiting:
    """Answers with 200 once it may, and says that a request has come."""

    def __init__(self, *, begins: bool = False) -> None:
        self.come, self.allowed = asyncio.Event(), asyncio.Event()
        self._begins = begins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if self._begins:
            await send(start)
        self.come.set()
        await self.allowed.wait()
        if not self._begins:
            await send(start)
        await send({"type": "http.response.body", "body": b"done"})


@asynccontextmanager
async def asked(
    app: ASGIApp, come: asyncio.Event, path: str, *, graceful_s: int
) -> AsyncIterator[tuple[HttpServer, "asyncio.Task[None]", "asyncio.Task[httpx.Response]"]]:
    """A server that has a request, the task that serves, and the task that waits for the answer."""
    limits = ConnectionLimits()
    server = HttpServer(app, host="127.0.0.1", port=0, limits=limits, graceful_s=graceful_s)
    await server.listen()
    serving = asyncio.create_task(server.serve())
    async with httpx.AsyncClient(timeout=60) as client:
        answer = asyncio.create_task(client.get(f"http://127.0.0.1:{server.port}{path}"))
        await come.wait()
        yield server, serving, answer
        await serving


@pytest.mark.parametrize(
    ("path", "form"), [("/api/v1/runs", "code"), ("/v1/chat/completions", "error")]
)
async def test_a_request_that_the_server_cancels_may_be_sent_again(path: str, form: str) -> None:
    waiting = Waiting()
    app = AnswersAtTheEnd(waiting)
    async with asked(app, waiting.come, path, graceful_s=0) as (server, _, answer):
        server.stop()
        found = await answer
    assert found.status_code == 503
    assert found.headers["retry-after"]
    assert form in found.json()


async def test_twin_without_it_the_answer_is_500() -> None:
    waiting = Waiting()
    async with asked(waiting, waiting.come, "/", graceful_s=0) as (server, _, answer):
        server.stop()
        assert (await answer).status_code == 500


async def test_an_answer_that_has_begun_breaks_off() -> None:
    waiting = Waiting(begins=True)
    app = AnswersAtTheEnd(waiting)
    async with asked(app, waiting.come, "/", graceful_s=0) as (server, _, answer):
        server.stop()
        with pytest.raises(httpx.TransportError):
            await answer


async def test_requests_are_answered_before_the_rest_of_the_process_ends() -> None:
    waiting = Waiting()
    async with asked(waiting, waiting.come, "/", graceful_s=3) as (server, serving, answer):
        finishing = asyncio.create_task(finish_requests(server, serving))
        await asyncio.sleep(0.05)
        assert not finishing.done()
        waiting.allowed.set()
        await finishing
        assert serving.done()
        assert (await answer).status_code == 200
