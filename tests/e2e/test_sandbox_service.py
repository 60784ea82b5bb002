"""Runs whose user code is in a sandbox service: one that is killed again and again, and one that is
reached by TCP. The bits are those of an undisturbed run."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from infra.sandbox.service.child import ChildService
from infra.sandbox.service.client import SandboxClient
from schemas.events import SampleGenerated
from tests.kit.in_memory import InMemory, in_memory
from tests.kit.platform import ROOT, ROWS, make_workspace, run_config
from tests.kit.sandbox_certificates import tls_variables

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("service") / "workspace")


def adapter(
    workspace: Path, home: Path, *, environ: Mapping[str, str] | None = None, kills: int = 0
) -> str:
    """The hash of the final weights of a run. `kills`: how often the service is killed meanwhile."""
    home.mkdir()
    rows = home / "rows.jsonl"
    rows.write_text(ROWS)

    async def train() -> str:
        async with (
            in_memory(home / "home", environ=environ) as started,
            asyncio.timeout(120),
        ):
            await started.workspaces.add(str(workspace), "w")
            await started.upload("numbers", rows)
            ticking = asyncio.ensure_future(tick(started))
            killing = asyncio.ensure_future(kill(started, kills))
            await started.run_to_end(run_config(), workspace="w")
            ticking.cancel()
            assert await killing == kills
            return started.final_adapter()

    return asyncio.run(train())


async def tick(started: InMemory) -> None:
    """Move the clock of the database, so that effects are attempted again."""
    while True:
        await asyncio.sleep(0.05)
        started.world.advance(0.5)


async def kill(started: InMemory, times: int) -> int:
    """Kill the service after the first sample, and again after a few more each time. Returns how many
    services were killed."""
    killed: set[int] = set()
    if not times:
        return 0
    assert isinstance(started.user, SandboxClient)
    service = started.user._service
    assert isinstance(service, ChildService)
    while len(killed) < times:
        await asyncio.sleep(0.01)
        pid, num = service.pid, len(started.events_of(SampleGenerated))
        if pid is not None and pid not in killed and num > 5 * len(killed):
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    return len(killed)


@pytest.fixture(scope="module")
def undisturbed(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return adapter(workspace, tmp_path_factory.mktemp("undisturbed") / "home")


def test_a_service_that_is_killed_changes_no_bit(
    workspace: Path, tmp_path: Path, undisturbed: str
) -> None:
    assert adapter(workspace, tmp_path / "home", kills=3) == undisturbed


@contextlib.contextmanager
def listening() -> Iterator[int]:
    """A service of its own; its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "infra.sandbox.service", "--listen", "tcp://127.0.0.1:0"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **tls_variables("service")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline().split()[-1])
    finally:
        process.terminate()
        process.communicate()
        assert process.returncode == 0


def test_a_service_elsewhere_changes_no_bit(
    workspace: Path, tmp_path: Path, undisturbed: str
) -> None:
    with listening() as port:
        environ = {
            "HEADRACE_SANDBOX_URL": f"tcp://127.0.0.1:{port}",
            **tls_variables("client"),
        }
        assert adapter(workspace, tmp_path / "home", environ=environ) == undisturbed
