"""kill -9 of the control process between a forge and the log: each push makes one run with the same
bits, and its commit gets one final status.

A real Gitea delivers each webhook once, so a delivery that dies with the process is lost. Polls find its
push.
"""

from pathlib import Path

import pytest

from infra.failpoints import CONSUMERS, NAMED, runtime_points
from schemas.effects import ListRefs
from tests.kit.gitea import Gitea
from tests.kit.gitea_team import gitea_team
from tests.kit.platform import final_adapter, platform, run_config
from tests.kit.pushed_workspace import CONFIG, toml_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.postgres,
    pytest.mark.gitea,
    pytest.mark.kills,
    pytest.mark.slow,
]

WEBHOOK = tuple(point for point in NAMED if point.startswith("webhook."))
LISTING = tuple(
    point for point in runtime_points("sync", (ListRefs,)) if point.startswith("sync.perform.")
)
STATUS = runtime_points("status", CONSUMERS["status"])
STEPS = {"advanced": {"max_steps": 3}}
MOST_PUSHES = 8


def fired(directory: Path) -> set[str]:
    """The failpoints that have killed a process."""
    return {marker.name for marker in (directory / "home" / "failpoints").iterdir()}


def test_kills_around_webhooks_listings_and_statuses_change_nothing(
    gitea: Gitea, tmp_path: Path
) -> None:
    points = (*WEBHOOK, *LISTING, *STATUS)
    settings = {
        **gitea.environment,
        "HEADRACE_POLL_S": "1",
        "HEADRACE_FAILPOINT": ",".join(f"{point}:1" for point in points),
    }
    with platform(tmp_path / "home", environment=settings) as running:
        running.upload("numbers")
        team = gitea_team(gitea, running, tmp_path / "clone")
        team.push({CONFIG: toml_of(**STEPS)}, message="longer [skip train]")
        # Each point kills once, so the first push loses its delivery and a later one does not. One that
        # is delivered while the process starts again is lost too, so a slow machine needs more of them.
        pushed: list[str] = []
        while len(pushed) < 3 or (len(pushed) < MOST_PUSHES and not fired(tmp_path) >= {*WEBHOOK}):
            pushed.append(team.push(message=f"push {len(pushed)}"))
            team.ends(pushed[-1], within_s=200)
        runs = [team.workspace.wait_for_run(sha)["run"] for sha in pushed]
        hashes = {final_adapter(running.wait(run, "finished")) for run in runs}
        shown = running.get("/runs", limit=50)["runs"]
        assert sorted(run["id"] for run in shown) == sorted(runs)
        calm = running.submit(run_config(**STEPS), workspace=team.workspace.id)
        hashes.add(final_adapter(running.wait(calm, "finished")))
    assert fired(tmp_path) == {*points}
    assert len(hashes) == 1
