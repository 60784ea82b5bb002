"""A whole `headrace up` answers `/healthz` while it syncs hostile repositories."""

import time
from pathlib import Path

import pytest

from tests.kit.platform import Platform, platform, run_config
from tests.kit.raw_repository import RawRepository
from tests.unit.infra.repositories.git.hostile.test_hostile_repositories import KINDS
from tests.unit.infra.repositories.git.hostile.test_hostile_server import WORST_S, probing

pytestmark = [pytest.mark.attacks, pytest.mark.processes, pytest.mark.torch]

HEAVIEST = (
    "a message of 100 MB",
    "a million files in one tree",
    "10^10 files",
    "10,000 levels",
    "100,000 branches",
)
TRIES = 3
"""How often a kind may be tried, because the machine may have other work."""

SYNC_S = 6.0
"""How long a repository is watched. Most are refused in that time, and some are tried again."""


def sync(running: Platform, url: Path, name: str) -> None:
    """Submit a run of a repository, and let it be synced."""
    began = time.monotonic()
    assert running.post("/workspaces", {"url": str(url), "name": name}).status_code == 201
    run = running.submit(run_config(), workspace=name)
    while time.monotonic() - began < SYNC_S:
        if running.info(run)["run"]["status"] == "failed":
            return
        time.sleep(0.1)


def test_a_hostile_repository_keeps_nobody_waiting(tmp_path: Path) -> None:
    sources = {}
    for number, name in enumerate(HEAVIEST):
        sources[name] = tmp_path / f"source-{number}"
        KINDS[name].make(RawRepository(sources[name]))
    with platform(tmp_path / "home") as running:
        running.upload("numbers")
        port = int(running.url.rpartition(":")[2])
        for number, name in enumerate(HEAVIEST):
            waits = []
            for attempt in range(TRIES):
                with probing(port) as longest_waits:
                    sync(running, sources[name], f"w-{number}-{attempt}")
                    ours, idle = longest_waits()
                waits.append(f"{ours:.3f} s, an idle process {idle:.3f} s")
                if ours < WORST_S + idle:
                    break
            else:
                pytest.fail(f"{name}: /healthz took {'; '.join(waits)}")
