"""Each protection of level `bwrap`, by a script that tries to get around it. Its twin is the same script
at level `process-trusted`, or with another limit, where it succeeds."""

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from infra.sandbox.interpreter import find_interpreter
from infra.sandbox.levels import bubblewrap, memory_watch
from infra.sandbox.levels.cgroups import find_place
from infra.sandbox.levels.level import ConfinedCommand, Level, ProcessLimits
from infra.sandbox.levels.probe import choose_level
from infra.sandbox.user_process import UserProcess, user_group

pytestmark = pytest.mark.processes

TRUSTED, BWRAP = "process-trusted", "bwrap"
SMALL = ProcessLimits(memory_bytes=1 << 30, written_bytes=8 << 20, processes=64)
DEADLINE_S = 30.0


async def start(level: Level, script: str, **values: object) -> UserProcess:
    python = find_interpreter()
    command = ConfinedCommand(
        [str(python.path), "-I", "-S", "-c", script],
        **{
            "env": {"PATH": "/usr/bin:/bin"},
            "cwd": Path("/"),
            "readable": python.files,
            "limits": SMALL,
            **values,
        },  # type: ignore[arg-type]  # values of a test are what it says
    )
    return await level.start(command)


async def outcome(level_name: str, script: str, **values: object) -> str:
    """What a script prints, or the last line of its error."""
    process = await start(choose_level(level_name), script, **values)

    def read() -> str:
        with os.fdopen(process.output, "rb") as output:
            return output.read().decode()

    async with asyncio.timeout(DEADLINE_S):
        said = await asyncio.to_thread(read)
        await process.wait(within_s=DEADLINE_S)
    return (said.strip().splitlines() or [""])[-1]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user of this machine can enter, with a file that they can change."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        file = Path(place, "file")
        file.write_text("of the platform")
        file.chmod(0o666)
        yield file


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a server on the machine's loopback."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


async def test_files_of_the_machine_are_not_there(shared: Path) -> None:
    script = f"print(open({str(shared)!r}).read())"
    assert await outcome(TRUSTED, script) == "of the platform"
    assert "FileNotFoundError" in await outcome(BWRAP, script)
    assert (
        await outcome(BWRAP, script, readable=(*find_interpreter().files, shared))
        == "of the platform"
    )


async def test_files_that_are_there_cannot_be_changed(shared: Path) -> None:
    script = f"open({str(shared)!r}, 'w').write('changed')"
    assert "Read-only" in await outcome(BWRAP, script, readable=(*find_interpreter().files, shared))
    assert shared.read_text() == "of the platform"
    await outcome(BWRAP, script, writable=(shared,))
    assert shared.read_text() == "changed"


@pytest.mark.parametrize("path", ["/x", "/etc/x", "/dev/x", "/usr/x", "/run/x"])
async def test_the_system_cannot_be_written(path: str) -> None:
    error = await outcome(BWRAP, f"open({path!r}, 'w')")
    assert "Read-only" in error or "No such file" in error


async def test_secrets_of_etc_are_not_there() -> None:
    script = "import os; print(sorted(os.listdir('/etc')), open('/etc/passwd').read().count(':'))"
    assert "shadow" in await outcome(TRUSTED, script)
    said = await outcome(BWRAP, script)
    assert "passwd" in said
    assert not {"shadow", "ssh", "hostname", "machine-id"} & set(said.split("'"))


async def test_other_processes_do_not_exist() -> None:
    script = "import os; print(len([n for n in os.listdir('/proc') if n.isdigit()]))"
    assert int(await outcome(TRUSTED, script)) > 4
    assert int(await outcome(BWRAP, script)) <= 2


async def test_there_is_no_network(port: int) -> None:
    script = f"import socket; print(socket.create_connection(('127.0.0.1', {port})).recv(9))"
    assert await outcome(TRUSTED, script) == "b'hello'"
    assert "ConnectionRefusedError" in await outcome(BWRAP, script)
    assert await outcome(BWRAP, script, network=True) == "b'hello'"
    anywhere = (
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))"
    )
    assert "unreachable" in await outcome(BWRAP, anywhere)


async def test_the_gateway_brings_no_network(port: int, shared: Path) -> None:
    script = f"import socket; print(socket.create_connection(('127.0.0.1', {port})).recv(9))"
    assert "ConnectionRefusedError" in await outcome(BWRAP, script, gateway=shared)
    assert await outcome(BWRAP, script, gateway=shared, network=True) == "b'hello'"


async def test_abstract_sockets_are_of_the_sandbox() -> None:
    name = f"\0headrace-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)
        listening.listen()
        script = (
            f"import socket; socket.socket(socket.AF_UNIX).connect({name!r}); print('connected')"
        )
        assert await outcome(TRUSTED, script) == "connected"
        assert "ConnectionRefusedError" in await outcome(BWRAP, script)


async def test_the_gateways_socket_is_a_file() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hi")
        writer.close()

    script = (
        "import os, socket; s = socket.socket(socket.AF_UNIX);"
        "s.connect(os.environ['HEADRACE_GATEWAY_SOCKET']); print(s.recv(9))"
    )
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        gateway = Path(place, "socket")
        server = await asyncio.start_unix_server(greet, gateway)
        os.chown(gateway, -1, -1 if (group := user_group()) is None else group)
        gateway.chmod(0o660)
        for level in (TRUSTED, BWRAP):
            assert await outcome(level, script, gateway=gateway) == "b'hi'"
        server.close()
        await server.wait_closed()


SIZED = """
import os
total, n = 0, 0
try:
    for place in ("/tmp", "/dev/shm"):
        for n in range(40):
            fd = os.open(f"{place}/f{n}-{place[1]}", os.O_CREAT | os.O_WRONLY)
            total += os.write(fd, b"x" * (1 << 18))
except OSError as error:
    print(total >> 20, error.strerror)
else:
    print(total >> 20, "MiB")
"""


async def test_all_written_files_have_one_bound() -> None:
    assert await outcome(BWRAP, SIZED) == "8 No space left on device"
    larger = ProcessLimits(memory_bytes=1 << 30, written_bytes=64 << 20, processes=64)
    assert await outcome(BWRAP, SIZED, limits=larger) == "20 MiB"


FORKS = """
import os, time
n = 0
try:
    while n < 100:
        if os.fork() == 0:
            time.sleep(60)
        n += 1
except OSError as error:
    print(n, error.strerror)
else:
    print(n)
"""


async def test_processes_are_counted() -> None:
    n, _, error = (await outcome(BWRAP, FORKS)).partition(" ")
    if find_place() is None and os.geteuid() != 0:
        pytest.skip("without control groups the launcher sets this limit inside")
    assert 40 < int(n) < 64
    assert "unavailable" in error
    larger = ProcessLimits(memory_bytes=1 << 30, processes=256)
    assert await outcome(BWRAP, FORKS, limits=larger) == "100"


MEMORY = """
import mmap, os, time
held = []
for n in range(4):
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        area = mmap.mmap(-1, 48 << 20)
        for page in range(0, 48 << 20, 4096):
            area[page] = 1
        os.write(writing, b"x")
        time.sleep(60)
    os.close(writing)
    os.read(reading, 1)
    held.append(pid)
time.sleep(0.1)
print(sum(os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in held))
for pid in held:
    os.kill(pid, 9)
"""


async def test_memory_is_bounded_as_a_whole() -> None:
    if find_place() is None:
        pytest.skip("there are no control groups here")
    small = ProcessLimits(memory_bytes=128 << 20, processes=64)
    assert await outcome(BWRAP, MEMORY, limits=small) != "4"
    assert await outcome(BWRAP, MEMORY, limits=ProcessLimits(memory_bytes=512 << 20)) == "4"


async def test_memory_is_watched_where_there_are_no_control_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watch is the protection: without it, the sandbox keeps its memory."""
    monkeypatch.setattr(bubblewrap, "find_place", lambda: None)
    monkeypatch.setattr(memory_watch, "LOOK_S", 0.05)
    script = MEMORY.replace("time.sleep(0.1)", "time.sleep(1)")
    small = ProcessLimits(memory_bytes=128 << 20, processes=64)
    level = choose_level(BWRAP)
    process = await start(level, script, limits=small)
    assert await process.wait(within_s=DEADLINE_S)
    assert await asyncio.to_thread(os.read, process.output, 99) == b"", "it was ended"
    os.close(process.output)
    monkeypatch.setattr(memory_watch, "exceeds", lambda pid, most: False)
    assert await outcome(BWRAP, script, limits=small) == "4"


async def test_namespaces_cannot_be_made() -> None:
    script = (
        "import ctypes, os; c = ctypes.CDLL(None, use_errno=True);"
        "print([c.unshare(f) for f in (1 << 28, 1 << 17, 1 << 29)], os.strerror(ctypes.get_errno()))"
    )
    assert (await outcome(TRUSTED, script)).startswith("[0")
    assert await outcome(BWRAP, script) == "[-1, -1, -1] Operation not permitted"


async def test_the_state_of_a_process_is_confined() -> None:
    script = (
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'));"
        "names = ('CapEff', 'CapPrm', 'CapBnd', 'NoNewPrivs', 'Seccomp', 'Groups');"
        "import resource, os, socket;"
        "print(*(status[n].strip() for n in names), open('/proc/self/oom_score_adj').read().strip(),"
        "resource.getrlimit(resource.RLIMIT_CORE), socket.gethostname(), sorted(os.environ))"
    )
    nothing = "0" * 16
    assert await outcome(BWRAP, script) == (
        f"{nothing} {nothing} {nothing} 1 2  1000 (0, 0) sandbox ['LC_CTYPE', 'PATH', 'PWD']"
    )


async def test_a_sandbox_has_the_descriptors_that_were_passed() -> None:
    script = "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd')))"
    reading, writing = os.pipe()
    try:
        said = await outcome(BWRAP, script, pass_fds=(writing,))
    finally:
        os.close(reading)
        os.close(writing)
    found = {int(n) for n in said.strip("[]").split(",")}
    assert {0, 1, 2, writing} <= found
    assert len(found) == 5, "and the one that lists them"


async def test_values_are_not_in_the_arguments_of_any_process() -> None:
    level = choose_level(BWRAP)
    process = await start(level, "import time; time.sleep(60)", env={"KEY": "a-secret-value"})
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                found.append((place / "cmdline").read_bytes())
            except OSError:
                continue
    await process.end(within_s=5)
    os.close(process.output)
    assert not any(b"a-secret-value" in line for line in found)


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(300)
    os._exit(0)
time.sleep(300)
"""


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in children for found in (int(child), *descendants(int(child)))]


async def wait_for(pid: int, count: int) -> list[int]:
    async with asyncio.timeout(DEADLINE_S):
        while len(found := descendants(pid)) < count:
            await asyncio.sleep(0.02)
    return found


@pytest.mark.parametrize("end", ["the sandbox", "bubblewrap"])
async def test_nothing_outlives_a_sandbox(end: str) -> None:
    process = await start(choose_level(BWRAP), DAEMON)
    found = await wait_for(process.pid, 3)
    if end == "the sandbox":
        await process.end(within_s=5)
        assert not [pid for pid in found if Path(f"/proc/{pid}").exists()]
    else:
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            while any(Path(f"/proc/{pid}").exists() for pid in found):
                await asyncio.sleep(0.02)
        await process.wait(within_s=5)
    assert not process.alive
    os.close(process.output)


LEAVE_DAEMONS = """
import os, time
for _ in range(150):
    if os.fork() == 0:
        os.setsid()
        for descriptor in range(3):
            os.close(descriptor)
        held = bytearray(b"x" * (2 << 20))
        while "MARK":
            time.sleep(0.01)
time.sleep(0.2)
"""
"""A command that ends and leaves processes behind, which take the kernel a while to kill."""


async def count_daemons_after_a_command() -> int:
    """How many of the processes that a command left behind exist when its sandbox counts as dead."""
    mark = f"daemon-{os.getpid()}-{time.monotonic_ns()}"
    script = LEAVE_DAEMONS.replace("MARK", mark)
    process = await start(choose_level(BWRAP), script, limits=ProcessLimits(processes=400))
    assert await process.wait(within_s=DEADLINE_S)
    found = 0
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += mark.encode() in (place / "cmdline").read_bytes()
    os.close(process.output)
    return found


async def test_a_leftover_process_is_dead_when_its_command_is() -> None:
    assert [await count_daemons_after_a_command() for _ in range(3)] == [0, 0, 0]


async def test_twin_bubblewrap_ends_before_what_its_command_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bubblewrap.SandboxProcess, "_on_exit", UserProcess._on_exit)
    for _ in range(20):
        if await count_daemons_after_a_command():
            return
    pytest.fail("it would have been noticed")


async def test_a_command_that_ends_before_its_sandbox_is_known_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first process is only known when bubblewrap has ended."""
    first_process = bubblewrap._first_process

    async def late(info: BinaryIO, process: UserProcess) -> int:
        pid = await first_process(info, process)
        await process.wait(within_s=DEADLINE_S)
        return pid

    monkeypatch.setattr(bubblewrap, "_first_process", late)
    assert await count_daemons_after_a_command() == 0


async def test_twin_a_daemon_outlives_a_trusted_process() -> None:
    process = await start(choose_level(TRUSTED), DAEMON.replace("300", "20"))
    pid = int(await asyncio.to_thread(os.read, process.output, 99))
    await process.end(within_s=5)
    os.close(process.output)
    assert b"time.sleep(20)" in Path(f"/proc/{pid}/cmdline").read_bytes()
    os.kill(pid, signal.SIGKILL)


async def test_a_command_that_is_too_large_is_refused_and_leaves_nothing() -> None:
    level = choose_level(BWRAP)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing has one itself
    with pytest.raises(OSError, match="more than"):
        await start(level, "pass", env={"A": "x" * (2 << 20)})
    assert isinstance(level, bubblewrap.BubblewrapLevel)
    async with asyncio.timeout(DEADLINE_S):
        while level._users:
            await asyncio.sleep(0.02)
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208 - as above


async def test_no_control_group_is_left() -> None:
    place = find_place()
    if place is None:
        pytest.skip("there are no control groups here")
    level = choose_level(BWRAP)
    name = f"headrace-sandbox-{os.getpid()}-*"
    before = {group for path in place.paths for group in path.glob(name)}
    processes = [await start(level, "import time; time.sleep(60)") for _ in range(3)]
    assert len({group for path in place.paths for group in path.glob(name)} - before) >= 3
    for process in processes:
        await process.end(within_s=5)
        os.close(process.output)
    await level.aclose()
    assert not {group for path in place.paths for group in path.glob(name)} - before
