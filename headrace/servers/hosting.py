"""The host of a rollout server: the calls of the parent become attempts that the server makes.

It stands where `headrace/user_code/user_code_host.py` hosts a workflow, and speaks to the parent as that
does.
"""

import asyncio
import json
import os
import shutil
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from headrace import relay
from headrace.attempt_output import AttemptOutput
from headrace.servers.attempts import (
    AttemptFailed,
    Json,
    ServedAttempt,
    ServerGrade,
    chat_messages,
)
from headrace.servers.callbacks import ReportingRollouts
from headrace.servers.dialects import UnknownDialect, capacity_of, find_dialect, rollouts_of
from headrace.servers.leases import LeasedRollouts, plain_name
from headrace.servers.loopback import ServerAway
from headrace.servers.program import NotServing, ServerProgram, start_program

SILENT_S = 30.0
"""A server that answered nothing for so long at a deadline is blocked."""

MOST_KEPT = 32
"""How many finished attempts keep the files that the server wrote about them."""

Send = Callable[[Json], None]


class ServerHost:
    """Makes attempts with one server until the parent closes the pipe or the server ends. `port` is the
    one of the relay to the gateway."""

    def __init__(
        self,
        program: ServerProgram,
        rollouts: LeasedRollouts | ReportingRollouts,
        *,
        send: Send,
        port: int,
    ) -> None:
        self._program = program
        self._rollouts = rollouts
        self._send = send
        self._port = port
        self._running: dict[str, asyncio.Task[None]] = {}
        self._finished: deque[str] = deque()
        self._over = asyncio.Event()
        self._why = ""

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answer calls. If the server ends, tell the parent why, which then ends this process."""
        reading = asyncio.ensure_future(self._read(reader))
        ending = asyncio.ensure_future(self._program.end())
        blocked = asyncio.ensure_future(self._over.wait())
        await asyncio.wait((reading, ending, blocked), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            self._send({"ended": self._why or ending.result()})

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                size = struct.unpack(">I", await reader.readexactly(4))[0]
                message: Json = json.loads(await reader.readexactly(size))
            except asyncio.IncompleteReadError:
                return
            name = str(message["id"])
            if "cancel" in message:
                if (task := self._running.get(name)) is not None:
                    task.cancel()
                continue
            task = asyncio.ensure_future(self._answer(message))
            self._running[name] = task
            task.add_done_callback(partial(self._forget, name))

    def _forget(self, name: str, task: "asyncio.Task[None]") -> None:
        """Forget a call that has ended, and remove the files of calls that ended before it. Those of the
        last ones may still be being written."""
        if self._running.get(name) is task:
            del self._running[name]
        self._finished.append(name)
        while len(self._finished) > MOST_KEPT:
            self._program.remove_files(plain_name(self._finished.popleft()))

    async def _answer(self, message: Json) -> None:
        """Make one attempt and send its result."""
        try:
            async with asyncio.timeout(message["deadline_s"]):
                graded = await self._rollouts.make(self._attempt(message))
            result = _result_of(graded)
        except AttemptFailed as error:
            result = {"category": error.category, "error": error.message}
        except TimeoutError:
            deadline: float = message["deadline_s"]
            text = f"the rollout server gave no result within {deadline:g} s"
            result = {"category": "timeout", "error": text}
            if self._is_silent() and not self._is_alone():
                self._end("the rollout server answers nothing, so something blocks it")
                return
        except ServerAway as error:
            self._end(f"the rollout server: {error}")
            return
        left = self._output(message, result)
        self._send({"id": message["id"], **result, **({"output": left} if left else {})})
        if result.get("category") == "timeout" and self._is_silent():
            self._end("the rollout server answers nothing")

    def _output(self, message: Json, result: Json) -> Json | None:
        """Return what an attempt left behind: its files, and for one that failed the end of what the
        program printed, which may be about other attempts too."""
        output = AttemptOutput()
        if "grade" not in result:
            output.write(self._program.tail().encode())
        try:
            files = self._program.written_files(plain_name(str(message["id"])))
            if files is not None:
                output.collect(files)
        except OSError:
            output.is_cut = True
        return output.document()

    def _attempt(self, message: Json) -> ServedAttempt:
        return ServedAttempt(
            name=str(message["id"]),
            messages=chat_messages(message["prompt"]),
            label=message["label"],
            metadata=message["metadata"],
            chat_url=f"http://127.0.0.1:{self._port}{message['base_path']}",
            api_key=message["api_key"],
            agent_timeout_s=message["agent_timeout_s"],
            grader_timeout_s=message["grader_timeout_s"],
        )

    def _is_silent(self) -> bool:
        now = asyncio.get_running_loop().time()
        return now - self._program.server.answered_at > SILENT_S

    def _is_alone(self) -> bool:
        return len(self._running) <= 1

    def _end(self, why: str) -> None:
        self._why = self._why or f"{why}; its output ends: {self._program.tail()}"
        self._over.set()


def _result_of(graded: ServerGrade) -> Json:
    grade: Json = {"index": 0, "reward": graded.reward, "parts": {}, "error": graded.problem}
    return {"grade": grade}


async def host_server(incoming: int, send: Send, entrypoint: Path) -> None:
    """Start the server of an entry point, and make attempts with it until the parent closes the pipe."""
    port = relay.start(relay.gateway_socket())
    if os.environ.get(relay.NETWORK):
        relay.use_as_proxy(port)
    reader = asyncio.StreamReader(limit=1 << 30)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(incoming, "rb")
    )
    try:
        program = await start_program(entrypoint)
        try:
            dialect = await find_dialect(program.server)
            capacity = await capacity_of(program.server)
        except ServerAway as error:
            raise NotServing(f"the rollout server: {error}") from error
    except (NotServing, UnknownDialect) as error:
        send({"unusable": str(error)[:2000]})
        return
    send({"ready": True, "capacity": capacity})
    try:
        rollouts = rollouts_of(program.server, dialect)
        await ServerHost(program, rollouts, send=send, port=port).serve(reader)
    finally:
        program.process.kill()
        shutil.rmtree(program.artifacts, ignore_errors=True)
