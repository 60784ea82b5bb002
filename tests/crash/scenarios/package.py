"""kill -9 while packages are chosen and installed, and around both: the same packages and bits."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.kit.kills import Stage, once
from tests.kit.ledger import check
from tests.kit.package_index import serve_index
from tests.kit.platform import MAIN, final_adapter, run_config

POINTS = once(
    "sync.perform.FetchCommit.effect_done",
    "sync.perform.FetchCommit.tx_after_commit",
    "sync.perform.DiscoverRollouts.claimed",
    "sync.perform.DiscoverRollouts.effect_done",
    "sync.perform.DiscoverRollouts.tx_after_commit",
)
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


def act(stage: Stage) -> str:
    """The hash of a run that needs a package, which is installed once."""
    with (
        serve_index(stage.root / "index") as index,
        tempfile.TemporaryDirectory(prefix="headrace-test-") as directory,
    ):
        Path(directory).chmod(0o755)  # user code reads it, as root too
        index.add_wheel("one", "1.0", files={"one.py": "DIVISOR = 8\n"})
        killer = Killer(Path(directory))
        if stage.points:
            index.on_request = killer
        settings = {"HEADRACE_PACKAGE_INDEX": index.url, "HEADRACE_ENVIRONMENTS": directory}
        with stage.platform(settings, files=FILES) as started:
            run = started.submit(run_config(), workspace="w")
            info = started.wait(run, "finished", within_s=400)
            check(started.events(run), steps=4, groups=2, samples=4)
            logs = started.get(f"/runs/{run}/logs", limit=50)["logs"]
    assert killer.killed == (["choosing", "installing"] if stage.points else [])
    installed = [line["message"] for line in logs if "Installing 1" in line["message"]]
    assert len(installed) == 1
    assert "Installing 1 package of rollout say for Python 3." in installed[0]
    return final_adapter(info)
