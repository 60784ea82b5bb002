"""The program of a rollout server: how it is started, and how we know that it is ready."""

import ast
import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import headrace
from headrace.error_location import rollout_folder, workspace_path
from headrace.servers.loopback import Loopback, ServerAway
from headrace.servers.recognition import served_kind

PORTS = ("_OSMOSIS_ROLLOUT_PORT", "ROLLOUT_PORT")
START_S = 240.0
HEALTH_S = 5.0
LOOK_S = 0.05
END_S = 5.0
KEPT_OUTPUT = 4096
STARTS = 3
IN_USE = "address already in use"


class NotServing(Exception):
    """The program serves nothing; the message says why, with the end of its output."""


class ServerProgram:
    """The process of a rollout server, and its port on 127.0.0.1."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, artifacts: Path) -> None:
        self.process = process
        self.server = Loopback(port)
        self.artifacts = artifacts
        self._output = bytearray()
        self._reading = asyncio.ensure_future(self._read())

    async def wait_ready(self) -> None:
        """Wait until it answers GET /health. Raises NotServing."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_S
        why = "it does not listen"
        while loop.time() < deadline:
            if self.process.returncode is not None:
                raise NotServing(await self.end())
            try:
                reply = await self.server.request("GET", "/health", timeout_s=HEALTH_S)
            except ServerAway as error:
                why = str(error)
            else:
                if reply.status == 200:
                    return
                why = f"GET /health answers {reply.status}"
            await asyncio.sleep(LOOK_S)
        failed = NotServing(
            f"the rollout server did not serve port {self.server.port} within {START_S:g} s: {why}; "
            f"it must listen on the port in {PORTS[0]} or {PORTS[1]}{self._ports()}. "
            f"Its output ends: {self.tail()}"
        )
        await self._kill()
        raise failed

    async def _kill(self) -> None:
        """End the process, and wait for its end. A child of it that holds its output open is not waited
        for."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self.end()

    async def end(self) -> str:
        """Wait for the end of the process. Returns what to say about it."""
        code = await self.process.wait()
        await self._reading
        return f"the rollout server ended with exit code {code}; its output ends: {self.tail()}"

    def written_files(self, rollouts: str) -> Path | None:
        """Return the directory of the files of the newest rollout with an id of this prefix."""
        found = [place for root in self._roots() for place in root.glob(f"{rollouts}-*/artifacts")]
        return max(found, key=lambda place: place.stat().st_mtime, default=None)

    def remove_files(self, rollouts: str) -> None:
        """Remove the files of the rollouts with ids of this prefix. Older packages write them into the
        home directory instead of the place that they are given."""
        for root in self._roots():
            for left in root.glob(f"{rollouts}-*"):
                shutil.rmtree(left, ignore_errors=True)

    def _roots(self) -> tuple[Path, Path]:
        return self.artifacts, Path.home() / ".osmosis"

    def tail(self) -> str:
        """Return the end of its output."""
        return self._output.decode(errors="replace").strip()[-2000:] or "nothing"

    def _ports(self) -> str:
        found = listening_ports(self.process.pid) - {self.server.port}
        return f", but it listens on {', '.join(map(str, sorted(found)))}" if found else ""

    async def _read(self) -> None:
        """Pass the output on, and keep its end."""
        assert self.process.stdout is not None  # noqa: S101 - it is a pipe
        while chunk := await self.process.stdout.read(1 << 16):
            self._output = (self._output + chunk)[-KEPT_OUTPUT:]
            with contextlib.suppress(OSError):
                os.write(1, chunk)


async def start_program(entrypoint: Path) -> ServerProgram:
    """Start the program of an entry point and wait until it serves. Raises NotServing."""
    for _ in range(STARTS):
        program = await _start(entrypoint, free_port())
        try:
            await program.wait_ready()
        except NotServing as error:  # somebody else may have taken the port in the meantime
            failed = error
            if IN_USE not in str(error).lower():
                break
        else:
            return program
    raise failed


async def _start(entrypoint: Path, port: int) -> ServerProgram:
    """Start `python ENTRYPOINT` in the folder of its rollout. It stays in our process group, so it ends
    with us."""
    artifacts = Path(tempfile.mkdtemp(prefix="rollouts-"))
    name = Path(workspace_path(entrypoint, entrypoint)).parts[1]
    own = {
        **dict.fromkeys(PORTS, str(port)),
        "_OSMOSIS_ROLLOUT_ARTIFACT_ROOT": str(artifacts),
        "_OSMOSIS_ROLLOUT_INSTANCE_ID": f"{name}-{os.getpid()}",
        "_OSMOSIS_ROLLOUT_NAME": name,
    }
    usual = {"PYTHONUNBUFFERED": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    process = await asyncio.create_subprocess_exec(
        *command_of(entrypoint),
        cwd=rollout_folder(entrypoint),
        env={**usual, **os.environ, **own},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    return ServerProgram(process, port, artifacts)


def command_of(entrypoint: Path) -> list[str]:
    """Return the command that serves an entry point: itself, or our program for environments."""
    tree = ast.parse(entrypoint.read_text())
    if served_kind(tree, entrypoint) != "environment":
        return [sys.executable, str(entrypoint)]
    # By `-c`, because a script would put its own folder first on the path of imports.
    sdk = str(Path(headrace.__file__).resolve().parents[1])
    run = f"import sys; sys.path[0] = {sdk!r}; from headrace.servers import verifiers_environments"
    return [sys.executable, "-c", f"{run}; verifiers_environments.main()", str(entrypoint)]


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens, as far as we may look."""
    ports: set[int] = set()
    with contextlib.suppress(OSError, ValueError, IndexError):
        held = {
            link.removeprefix("socket:[").removesuffix("]")
            for each in Path(f"/proc/{pid}/fd").iterdir()
            if (link := str(each.readlink())).startswith("socket:[")
        }
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == "0A" and columns[9] in held:
                    ports.add(int(columns[1].rpartition(":")[2], 16))
    return ports
