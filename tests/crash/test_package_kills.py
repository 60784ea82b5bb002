"""kill -9 while packages are chosen and installed, and around both: the same packages and bits."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.ledger import check
from tests.kit.package_index import LocalIndex, serve_index
from tests.kit.platform import MAIN, final_adapter, make_workspace, platform, run_config

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

POINTS = {
    "sync.perform.FetchCommit.effect_done": 1,
    "sync.perform.FetchCommit.tx_after_commit": 1,
    "sync.perform.DiscoverRollouts.claimed": 1,
    "sync.perform.DiscoverRollouts.effect_done": 1,
    "sync.perform.DiscoverRollouts.tx_after_commit": 1,
}
PROJECT = """[project]
name = "say"
version = "0"
dependencies = ["one"]
"""
FILES = {
    "rollouts/say/main.py": MAIN.replace("/ 8", "/ one.DIVISOR").replace(
        "from headrace", "import one\nfrom headrace"
    ),
    "rollouts/say/pyproject.toml": PROJECT,
}
SERVICE = b"infra.sandbox.service"


@pytest.fixture
def environments() -> Iterator[Path]:
    """Where user code can read it, as root too."""
    root = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


class Killer:
    """Kills the control process while packages are chosen, and the service that starts user code while
    they are installed, each once. `killed` are the moments."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.killed: list[str] = []

    def __call__(self, path: str) -> None:
        """The index is asked for a file."""
        is_building = any(self._directory.glob("*.partial/env"))
        moment = "installing" if is_building else "choosing"
        if moment in self.killed:
            return
        self.killed.append(moment)
        for service, parent in self._services():
            os.kill(service if is_building else parent, signal.SIGKILL)

    def _services(self) -> Iterator[tuple[int, int]]:
        """The services that have an environment open for writing, with their parents."""
        marker = f"HEADRACE_ENVIRONMENTS={self._directory}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if SERVICE in words and marker in environ.split(b"\0"):
                yield int(entry.name), int(words[words.index(b"--parent") + 1])


def run_once(
    root: Path, index: LocalIndex, environments: Path, failpoints: str
) -> tuple[str, list[str], set[str]]:
    """One run: its final hash, the keys of the packages in its log, and the points that fired."""
    workspace = make_workspace(root / "workspace", FILES)
    settings = {
        "HEADRACE_PACKAGE_INDEX": index.url,
        "HEADRACE_ENVIRONMENTS": str(environments),
        "HEADRACE_FAILPOINT": failpoints,
    }
    with platform(root / "home", environment=settings) as started:
        started.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
        started.upload("numbers")
        run = started.submit(run_config(), workspace="w")
        info = started.wait(run, "finished", within_s=400)
        check(started.events(run), steps=4, groups=2, samples=4)
        said = [line["message"] for line in started.get(f"/runs/{run}/logs", limit=50)["logs"]]
    fired = root / "home" / "failpoints"
    names = {marker.name for marker in fired.iterdir()} if fired.exists() else set()
    return final_adapter(info), said, names


def test_kills_while_packages_are_chosen_and_installed_change_nothing(
    tmp_path: Path, environments: Path
) -> None:
    with serve_index(tmp_path / "index") as index:
        index.add_wheel("one", "1.0", files={"one.py": "DIVISOR = 8\n"})
        calm, said, _ = run_once(tmp_path / "calm", index, environments / "calm", "")
        assert any("Installing 1 package of rollout say for Python 3." in line for line in said)
        killer = Killer(environments / "killed")
        index.on_request = killer
        armed = ",".join(f"{name}:{hit}" for name, hit in POINTS.items())
        killed, said, fired = run_once(tmp_path / "killed", index, environments / "killed", armed)
    assert killer.killed == ["choosing", "installing"]
    assert fired == set(POINTS)
    assert sum("Installing 1" in line for line in said) == 1
    assert killed == calm
