"""A small rollout server of generation 3, around a function that makes one rollout.

An environment of another library becomes a rollout server with it.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from headrace.servers.attempts import Json
from headrace.servers.leases import LEASE_HEADER
from headrace.servers.loopback import read_head

WAIT_S = 30.0
KEPT = 256
"""How many finished rollouts are kept until somebody asks for them."""

LARGEST_REQUEST = 32 << 20

Make = Callable[[Json], Awaitable[float]]
"""Makes the rollout of a request and returns its reward."""


TASK = "task"
"""The key of a row's metadata that holds its task, as JSON text."""


def task_of(request: Json) -> object:
    """Return the task in a request: a JSON object, the number of a task, or None."""
    task = (request.get("metadata") or {}).get(TASK)
    return json.loads(task) if isinstance(task, str) else task


class RolloutFailed(Exception):
    """A rollout has no reward; the message says why."""


@dataclass
class _Served:
    """A rollout that was admitted. `result` is None until it has ended."""

    lease: str
    task: "asyncio.Task[None] | None" = None
    result: Json | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class RolloutServer:
    """Serves rollouts that `make` makes, `capacity` at the same time (None: it has no limit)."""

    def __init__(self, make: Make, *, capacity: int | None = None) -> None:
        self._make = make
        self._capacity = capacity
        self._rollouts: dict[str, _Served] = {}

    async def serve(self, port: int) -> None:
        """Serve on 127.0.0.1 without end."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=64 << 10)
        await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        with (
            contextlib.closing(writer),
            contextlib.suppress(OSError, EOFError, ValueError, asyncio.LimitOverrunError),
        ):
            first, headers = await read_head(reader)
            method, path, *_ = first.split(" ")
            size = int(headers.get("content-length", "0"))
            if size <= LARGEST_REQUEST:
                body = await reader.readexactly(size)
                status, said = await self._answer(f"{method} {path}", headers, body)
                data = json.dumps(said).encode()
                shown = f"HTTP/1.1 {status} Answer\r\ncontent-type: application/json\r\n"
                length = f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
                writer.write((shown + length).encode() + data)
                await writer.drain()

    async def _answer(self, asked: str, headers: dict[str, str], body: bytes) -> tuple[int, Json]:
        match asked.split("/"):
            case ["GET ", "health"]:
                return 200, {"status": "ok", "concurrency": {"max_concurrent": self._capacity}}
            case ["GET ", "openapi.json"]:
                return 200, {"paths": {"/rollout": {}, "/rollout/{rollout_id}/result": {}}}
            case ["POST ", "rollout"]:
                return self._admit(json.loads(body))
            case ["POST ", "rollout", "cancel"]:
                return 200, {"dispositions": self._cancel(json.loads(body)["ids"])}
            case ["GET ", "rollout", rollout, "result"]:
                return await self._result(rollout, headers.get(LEASE_HEADER.lower(), ""))
            case _:
                return 404, {"detail": "not found"}

    def _admit(self, request: Json) -> tuple[int, Json]:
        rollout = str(request["rollout_id"])
        if rollout in self._rollouts:
            return 409, {"detail": "rollout_id is already registered"}
        served = self._rollouts[rollout] = _Served(secrets.token_urlsafe(16))
        served.task = asyncio.ensure_future(self._run(served, request))
        for old in [name for name, each in self._rollouts.items() if each.result][:-KEPT]:
            del self._rollouts[old]
        admitted = {"rollout_id": rollout, "status": "queued", "polling_lease_token": served.lease}
        return 202, {**admitted, "result_wait_timeout_sec": WAIT_S}

    async def _run(self, served: _Served, request: Json) -> None:
        """Make one rollout, under both of its deadlines together."""
        limit = float(request["agent_timeout_sec"]) + float(request["grader_timeout_sec"])
        try:
            async with asyncio.timeout(limit):
                reward = await self._make(request)
            served.result = {"status": "success", "sample": {"messages": [], "reward": reward}}
        except asyncio.CancelledError:
            served.result = {"status": "cancelled", "err_message": "cancelled"}
        except TimeoutError:
            served.result = _failure("timeout", f"not finished after {limit:g} s")
        except RolloutFailed as error:
            served.result = _failure("agent_error", str(error))
        except Exception as error:  # an environment raises whatever it likes
            served.result = _failure("agent_error", f"{type(error).__name__}: {error}")
        served.ended.set()

    async def _result(self, rollout: str, lease: str) -> tuple[int, Json]:
        served = self._rollouts.get(rollout)
        if served is None:
            return 404, {"detail": "unknown rollout_id"}
        if not secrets.compare_digest(served.lease.encode(), lease.encode()):
            return 403, {"detail": "invalid polling lease"}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await served.ended.wait()
        return 200, {"rollout_id": rollout, **(served.result or {"status": "running"})}

    def _cancel(self, rollouts: list[str]) -> dict[str, str]:
        found = {}
        for rollout in rollouts:
            served = self._rollouts.get(rollout)
            is_running = served is not None and served.task is not None and served.task.cancel()
            found[rollout] = "cancelled_running" if is_running else "not_found"
        return found


def _failure(category: str, message: str) -> Json:
    return {"status": "failure", "err_category": category, "err_message": message[:2000]}
