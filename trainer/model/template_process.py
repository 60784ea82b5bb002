"""Renders the chat templates of models in a process with limits (`trainer/model/template_host.py`).

One process renders for all models, one text at a time, and is kept for later requests. It is killed when
a template does not finish in time. When it ends for another reason (for example killed from outside),
the text is rendered again.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from schemas.errors import FailureCategory, UserCodeError

HOST = Path(__file__).with_name("template_host.py")

DEADLINE_S = 10.0
"""The most seconds that one rendering may take. It usually takes less than a millisecond."""

START_S, END_S = 120.0, 5.0
ROOM_BYTES = 512 << 20
"""The bytes of memory that a rendering may use, in addition to what the process uses at its start."""

MOST_CHARS = 16 << 20
TRIES = 3
"""How many processes in a row must end during one text until its template is blamed."""

OVER = {
    "time": f"did not end within {DEADLINE_S:g} s",
    "memory": f"took more than {ROOM_BYTES >> 20} MiB of memory",
    "length": f"wrote more than {MOST_CHARS >> 20} Mi characters",
    "process": f"ended its process {TRIES} times",
}


class TemplateOverLimit(UserCodeError):
    """A chat template exceeded a limit of its process."""


class _Ended(Exception):
    """The process ended during a request."""


class TemplateProcess:
    """The process that renders. It is started at the first request, and again whenever it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, str]],
        *,
        reply_next: bool,
        names: Mapping[str, object],
    ) -> str:
        """The messages as `template` renders them, with `names` as its variables. Raises ValueError with
        the template's own error, TemplateOverLimit when it exceeds a limit."""
        request = {
            "template": template,
            "messages": list(messages),
            "reply_next": reply_next,
            "names": dict(names),
        }
        with self._lock:
            answer = self._answer(request)
        if "over" in answer:
            raise TemplateOverLimit(
                FailureCategory.VALIDATION,
                f"the model's chat template {OVER[str(answer['over'])]}. Name another model, or "
                "correct its chat_template",
            )
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["text"])

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        process.wait()

    def _answer(self, request: Mapping[str, object]) -> dict[str, object]:
        for _ in range(TRIES):
            try:
                answer = self._ask(self._running(), request)
            except TimeoutError:
                self.close()
                return {"over": "time"}
            except (_Ended, OSError):
                if self._exceeded_cpu_time():
                    self.close()
                    return {"over": "time"}
                self.close()
                continue
            if answer.get("over") == "memory":
                self.close()
            return answer
        return {"over": "process"}

    def _exceeded_cpu_time(self) -> bool:
        """Whether the process was ended by its limit of CPU time."""
        if self._process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(END_S) == -signal.SIGXCPU
        return False

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid():
            return self._process
        limits = (ROOM_BYTES, int(DEADLINE_S), MOST_CHARS)
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(HOST), *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
            cwd="/",
            start_new_session=True,
        )
        _receive(self._process, time.monotonic() + START_S)
        return self._process

    def _ask(
        self, process: subprocess.Popen[bytes], request: Mapping[str, object]
    ) -> dict[str, object]:
        assert process.stdin is not None  # noqa: S101 - it was started with one
        data = json.dumps(request).encode()
        process.stdin.write(struct.pack(">I", len(data)) + data)
        process.stdin.flush()
        return _receive(process, time.monotonic() + DEADLINE_S)


def _receive(process: subprocess.Popen[bytes], deadline: float) -> dict[str, object]:
    size = struct.unpack(">I", _read(process, 4, deadline))[0]
    answer: dict[str, object] = json.loads(_read(process, size, deadline))
    return answer


def _read(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    """Read `size` bytes. Raises TimeoutError at the deadline, _Ended when the process ended."""
    assert process.stdout is not None  # noqa: S101 - it was started with one
    descriptor, data = process.stdout.fileno(), bytearray()
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    while len(data) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not ready.poll(left_s * 1000):
            raise TimeoutError
        chunk = os.read(descriptor, min(size - len(data), 1 << 20))
        if not chunk:
            raise _Ended
        data += chunk
    return bytes(data)


shared_process = TemplateProcess()
"""The template process of this Python process."""

atexit.register(shared_process.close)
