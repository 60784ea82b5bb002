"""Keeps what user code leaves behind in one attempt: the text that it prints, the traceback of its
error, and the files in its artifacts directory.

Attempts run concurrently in one event loop, so the output of the running attempt is a context variable.
Threads and jobs of thread pools take it from the code that starts them. Bytes that are written into the
file descriptors 1 and 2 belong to the process and not to an attempt.
"""

import base64
import contextlib
import functools
import io
import os
import re
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from headrace.error_location import own_traceback, tree_of, workspace_path

MOST_PRINTED = 64 << 10
"""Bytes of printed text that are kept. The first half is the beginning and the second half the end."""

HALF = MOST_PRINTED // 2
GAP = "\n[... {} bytes are left out ...]\n"
MOST_TRACEBACK = 16 << 10
MOST_OF_TOOLS = 8 << 10
"""Characters of the tracebacks of tools. The rest is left for the error of the attempt itself."""

MOST_FILES = 32
MOST_FILE_BYTES = 8 << 20
MOST_ENTRIES = 1000
"""How many entries of the artifacts directory are looked at."""

LONGEST_NAME = 100
NEVER_AWAITED = "coroutine .* was never awaited"
UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")


class AttemptOutput:
    """The output of one attempt at an entry point. `is_cut` is true if something was left out."""

    def __init__(self, entry: Path | None = None) -> None:
        self.entry = entry
        self._head = bytearray()
        self._tail = bytearray()
        self._num_dropped = 0
        self._tracebacks: list[str] = []
        self._files: dict[str, str] = {}
        self.is_cut = False

    def write(self, data: bytes) -> None:
        """Keep printed bytes: the first HALF and the last HALF of all."""
        room = HALF - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._num_dropped += max(0, len(data) - HALF)
        self._tail += data[-HALF:]
        if len(self._tail) > 2 * HALF:
            self._trim()

    def fail_tool(self, error: BaseException) -> None:
        """Keep the traceback of an error that a tool raised. The attempt goes on."""
        if self.entry is not None:
            self.fail(error, self.entry, most=MOST_OF_TOOLS)

    def fail(self, error: BaseException, entry: Path, *, most: int = MOST_TRACEBACK) -> None:
        """Keep the traceback of an error, as far as it is the workspace's own code."""
        room = most - sum(map(len, self._tracebacks))
        text = own_traceback(error, entry)
        if text in self._tracebacks:
            return
        self.is_cut = self.is_cut or len(text) > room
        if room > 0:
            self._tracebacks.append(text[:room])

    def collect(self, directory: Path) -> None:
        """Keep the regular files below a directory, in the order of their names. Links are not
        followed. User code may have removed the directory, or made parts of it unreadable."""
        room = MOST_FILE_BYTES
        for path in self._regular_files(directory):
            try:
                data = _read_file(path, room)
            except OSError:
                continue
            if data is None or len(self._files) >= MOST_FILES:
                self.is_cut = True
                continue
            room -= len(data)
            name = self._new_name(path.relative_to(directory))
            self._files[name] = base64.b64encode(data).decode()

    def _regular_files(self, directory: Path) -> Iterator[Path]:
        found, num_seen = [directory], 0
        while found:
            place = found.pop()
            if place != directory and not place.is_dir():
                yield place
                continue
            inner: list[Path] = []
            with contextlib.suppress(OSError), os.scandir(place) as entries:
                for entry in entries:
                    num_seen += 1
                    if num_seen > MOST_ENTRIES:
                        self.is_cut = True
                        break
                    if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False):
                        inner.append(Path(entry.path))
            found += sorted(inner, reverse=True)

    def _new_name(self, path: Path) -> str:
        name = "/".join(UNUSUAL.sub("_", part) for part in path.parts)
        name = "/".join(part.lstrip(".") or "_" for part in name.split("/"))
        name = name[-LONGEST_NAME:].lstrip("./") or "_"
        return name if name not in self._files else f"{len(self._files)}-{name[-90:].lstrip('./')}"

    def document(self, *, place: str | None = None) -> dict[str, Any] | None:
        """Return the output as a message, or None when there is none. `place` is the place that the
        attempt has reached, if it has not ended."""
        if place is not None:
            traceback = place[-MOST_TRACEBACK:]
            return {"stdout": self._text(), "traceback": traceback, "is_cut": self._num_dropped > 0}
        if not (self._head or self._tracebacks or self._files or self.is_cut):
            return None
        return {
            "stdout": self._text(),
            "traceback": "\n".join(self._tracebacks) or None,
            "files": self._files,
            "is_cut": self.is_cut or self._num_dropped > 0,
        }

    def _text(self) -> str:
        self._trim()
        head = self._head.decode(errors="replace")
        if not self._num_dropped:
            return (self._head + self._tail).decode(errors="replace")
        tail = self._tail.decode(errors="replace")
        return head + GAP.format(self._num_dropped) + tail

    def _trim(self) -> None:
        extra = len(self._tail) - HALF
        if extra > 0:
            del self._tail[:extra]
            self._num_dropped += extra


def _read_file(path: Path, most: int) -> bytes | None:
    """Return the bytes of a regular file, or None when it is longer than `most`. Raises OSError, also
    for a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        data = file.read(most + 1)
    return None if len(data) > most else data


running: ContextVar[AttemptOutput | None] = ContextVar("running", default=None)
"""The output of the attempt that runs now, if one does."""


def fail_running(error: BaseException, entry: Path) -> None:
    """Keep the traceback of an error in the output of the running attempt."""
    output = running.get()
    if output is not None:
        output.fail(error, entry)


def fail_tool_running(error: BaseException) -> None:
    """Keep the traceback of an error that a tool raised, in the output of the running attempt."""
    if (output := running.get()) is not None:
        output.fail_tool(error)


def note_running(text: str) -> None:
    """Write a line of ours into the output of the running attempt."""
    if (output := running.get()) is not None:
        output.write(f"[headrace] {text}\n".encode(errors="replace"))


class _Printer(io.RawIOBase):
    """The bytes below `sys.stdout` and `sys.stderr`. Outside of an attempt they go to a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        output = running.get()
        if output is None:
            return os.write(self._descriptor, data)
        output.write(bytes(data))
        return len(data)

    def close(self) -> None:
        """Stay open, because other attempts print here too."""


def capture() -> None:
    """Give what this process prints to the attempt that prints it."""
    sys.stdout, sys.stderr = _open_text(1), _open_text(2)
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (threading.Thread, "start", _start_thread),
        (ThreadPoolExecutor, "submit", _submit_job),
    )
    for owner, name, function in replaced:
        setattr(owner, name, function)
    warnings.showwarning = _show_warning
    # Otherwise only the first attempt of a process would say it.
    warnings.filterwarnings("always", NEVER_AWAITED, RuntimeWarning)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """Print a warning as Python does, with the workspace's own line or none."""
    output = running.get()
    entry = output.entry if output is not None else None
    path = Path(filename)
    is_own = entry is not None and path.is_relative_to(tree_of(entry))
    place = f"{workspace_path(path, entry)}:{lineno}: " if entry is not None and is_own else ""
    advice = "; write `await` before its call" if re.fullmatch(NEVER_AWAITED, str(message)) else ""
    print(f"{place}{category.__name__}: {message}{advice}", file=file or sys.stderr)


def _open_text(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        _Printer(descriptor),  # type: ignore[arg-type]  # as Python does for streams without a buffer
        encoding="utf-8",
        errors="backslashreplace",
        write_through=True,
    )


_plain_start = threading.Thread.start
_plain_submit = ThreadPoolExecutor.submit


def _start_thread(thread: threading.Thread) -> None:
    output = running.get()
    if output is not None:
        vars(thread)["run"] = functools.partial(_run_for, output, thread.run)
    _plain_start(thread)


def _submit_job(pool: ThreadPoolExecutor, job: Any, /, *args: Any, **kwargs: Any) -> Any:
    return _plain_submit(pool, _run_for, running.get(), job, *args, **kwargs)


def _run_for(
    output: AttemptOutput | None, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    token = running.set(output)
    try:
        return function(*args, **kwargs)
    finally:
        running.reset(token)
