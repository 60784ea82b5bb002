"""A program that does not serve says why, and one that serves has its folder, port and names."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.servers import program
from headrace.servers.program import NotServing, command_of, start_program
from tests.agents.rollout_programs import STRANDS, VERIFIERS_V0
from tests.kit.rollout_server import ENDS, SERVER, WRONG_PORT

pytestmark = pytest.mark.processes


def entry(directory: Path, main: str) -> Path:
    """The entry point of a rollout `say`."""
    path = directory / "rollouts" / "say" / "main.py"
    path.parent.mkdir(parents=True)
    path.write_text(main)
    return path


async def test_a_program_serves_its_port_and_leaves_nothing(tmp_path: Path) -> None:
    started = await start_program(entry(tmp_path, SERVER))
    reply = await started.server.request("GET", "/openapi.json", timeout_s=5)
    assert reply.status == 200
    for rollout in ("a-1", "a-2", "b-1"):
        (started.artifacts / rollout / "artifacts").mkdir(parents=True)
    assert started.written_files("b") == started.artifacts / "b-1" / "artifacts"
    assert started.written_files("c") is None
    started.remove_files("a")
    assert [place.name for place in started.artifacts.iterdir()] == ["b-1"]
    started.process.kill()
    assert "exit code -9" in await started.end()


@pytest.mark.parametrize(
    ("main", "why"),
    [
        (ENDS, "ended with exit code 1; its output ends: no module named strands"),
        ("import absent", "No module named 'absent'"),
        ("import sys; sys.exit('Address already in use')", "Address already in use"),
    ],
)
async def test_a_program_that_ends_shows_the_end_of_its_output(
    tmp_path: Path, main: str, why: str
) -> None:
    with pytest.raises(NotServing) as raised:
        await start_program(entry(tmp_path, main))
    assert why in str(raised.value)


GARBAGE = """
import os, socketserver
class Garbage(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"hello")
port = int(os.environ["ROLLOUT_PORT"])
socketserver.TCPServer(("127.0.0.1", port), Garbage).serve_forever()
"""


async def test_programs_that_do_not_answer_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is given the whole time, so all are tried at once."""
    start, started = asyncio.create_subprocess_exec, []

    async def start_and_note(*command: str, **more: Any) -> asyncio.subprocess.Process:
        started.append(await start(*command, **more))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_note)
    monkeypatch.setattr(
        program, "START_S", 10.0
    )  # a loaded machine starts the programs within that

    async def refused(name: str, main: str) -> str:
        with pytest.raises(NotServing) as raised:
            await start_program(entry(tmp_path / name, main))
        return str(raised.value)

    wrong, garbage = await asyncio.gather(refused("wrong", WRONG_PORT), refused("garbage", GARBAGE))
    for told, why in ((wrong, "but it listens on "), (garbage, "GET /health failed")):
        assert "did not serve port" in told
        assert why in told
        assert "ROLLOUT_PORT" in told
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2, "it is waited for"


def test_an_environment_is_started_by_our_program(tmp_path: Path) -> None:
    path = entry(tmp_path, STRANDS)
    assert command_of(path)[1:] == [str(path)]
    path.write_text(VERIFIERS_V0)
    command = command_of(path)
    assert command[1] == "-c"
    assert command[3:] == [str(path)]
