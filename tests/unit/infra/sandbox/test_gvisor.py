"""Level `gvisor`: where its program comes from, and that nothing of a sandbox stays behind or shows its
secrets."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.sandbox.levels import gvisor_program
from infra.sandbox.levels.gvisor_program import find_runsc
from infra.sandbox.levels.level import ConfinedCommand
from infra.sandbox.levels.probe import choose_level, find_bubblewrap
from schemas.errors import InvalidConfig
from tests.kit.runsc import runsc

ROOT = Path(__file__).resolve().parents[4]
SECRET = "a-value-that-nobody-may-see"

SLEEPER = """
    import asyncio, sys
    from pathlib import Path
    from infra.sandbox.levels.level import ConfinedCommand
    from infra.sandbox.levels.probe import choose_level

    async def main():
        level = choose_level("gvisor")
        command = ConfinedCommand(["/bin/sh", "-c", "echo up; sleep 60"], {}, Path("/tmp"))
        process = await level.start(command)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: Up(), open(process.output, "rb")
        )
        await asyncio.sleep(60)

    class Up(asyncio.Protocol):
        def data_received(self, data):
            sys.stdout.write("up\\n")
            sys.stdout.flush()

    asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    find_runsc.cache_clear()
    yield
    find_runsc.cache_clear()


@pytest.fixture
def shown() -> Iterator[Path]:
    """A directory that every user can read."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_a_program_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_RUNSC", "/nonexistent/runsc")
    with pytest.raises(InvalidConfig, match="HEADRACE_RUNSC is '/nonexistent/runsc'"):
        find_runsc(find_bubblewrap())


def test_without_a_program_the_level_is_refused_and_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HEADRACE_RUNSC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gvisor_program, "PLACES", str(tmp_path))
    with pytest.raises(InvalidConfig, match="make gvisor"):
        choose_level("gvisor")


def test_a_program_that_confines_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_RUNSC", "/bin/false")
    with pytest.raises(InvalidConfig, match="'gvisor' does not work here"):
        choose_level("gvisor")


@pytest.mark.gvisor
@pytest.mark.processes
async def test_a_command_sees_another_kernel_and_no_network(shown: Path) -> None:
    runsc()
    (shown / "file").write_text("given")
    script = "dmesg | head -1; cat /proc/net/dev | wc -l; id -u; cat file; ls /; touch /x || true"
    level = choose_level("gvisor")
    process = await level.start(
        ConfinedCommand(["/bin/sh", "-c", script], {"PATH": "/bin"}, shown, readable=(shown,))
    )
    output = await _output(process.output)
    await process.end(within_s=5)
    os.close(process.output)
    assert "Starting gVisor" in output
    assert "given" in output
    assert "home" not in output.splitlines(), "nothing of this machine's root but programs"
    assert "Read-only file system" in output


@pytest.mark.gvisor
@pytest.mark.processes
async def test_variables_are_seen_by_the_command_only(tmp_path: Path) -> None:
    """Not in the arguments of processes, and in no file of this machine."""
    runsc()
    level = choose_level("gvisor")
    command = ConfinedCommand(
        ["/bin/sh", "-c", "echo $KEY; sleep 30"], {"KEY": SECRET}, Path("/tmp")
    )
    process = await level.start(command)
    try:
        assert (await _output(process.output, until=SECRET)).strip() == SECRET
        lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if _is_readable(p)]
        assert not [line for line in lines if SECRET.encode() in line]
        held = [p for p in tmp_path.parent.parent.rglob("*") if _holds(p)]
        assert held == []
    finally:
        await process.end(within_s=5)
        os.close(process.output)


@pytest.mark.gvisor
@pytest.mark.processes
def test_nothing_stays_behind_when_its_owner_is_killed() -> None:
    runsc()
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLEEPER)], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    started = _descendants(owner.pid)
    assert len(started) > 3
    mounts = Path("/proc/self/mountinfo").read_text()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    until = time.monotonic() + 10
    while (left := [pid for pid in started if _is_alive(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    assert left == []
    assert Path("/proc/self/mountinfo").read_text() == mounts


async def _output(descriptor: int, *, until: str | None = None) -> str:
    """What a process prints, until it ends or has printed a text."""
    text = b""
    async with asyncio.timeout(30):
        while until is None or until.encode() not in text:
            chunk = await asyncio.to_thread(os.read, descriptor, 4096)
            if not chunk:
                break
            text += chunk
    return text.decode()


def _is_readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def _holds(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size < 1 << 20 and SECRET in path.read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *_descendants(child)]
    return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
