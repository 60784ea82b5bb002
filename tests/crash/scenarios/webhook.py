"""kill -9 of the control process between a forge and the log: each push makes one run with the same
bits, and its commit gets one final status.

A real Gitea delivers each webhook once, so a delivery that dies with the process is lost. Polls find its
push.
"""

from infra.failpoints import CONSUMERS, NAMED, runtime_points
from schemas.effects import ListRefs
from tests.kit.gitea import Gitea
from tests.kit.gitea_team import gitea_team
from tests.kit.kills import Stage, arm, fired_points, once
from tests.kit.platform import final_adapter, platform, run_config
from tests.kit.pushed_workspace import CONFIG, toml_of

WEBHOOK = tuple(point for point in NAMED if point.startswith("webhook."))
LISTING = tuple(
    point for point in runtime_points("sync", (ListRefs,)) if point.startswith("sync.perform.")
)
POINTS = once(*WEBHOOK, *LISTING, *runtime_points("status", CONSUMERS["status"]))
STEPS = {"advanced": {"max_steps": 3}}
MOST_PUSHES = 8


def act(stage: Stage, gitea: Gitea) -> None:
    settings = {**gitea.environment, "HEADRACE_POLL_S": "1", **arm(stage.points)}
    with platform(stage.home, environment=settings) as running:
        running.upload("numbers")
        team = gitea_team(gitea, running, stage.root / "clone")
        team.push({CONFIG: toml_of(**STEPS)}, message="longer [skip train]")
        # Each point kills once, so the first push loses its delivery and a later one does not. One that
        # is delivered while the process starts again is lost too, so a slow machine needs more of them.
        pushed: list[str] = []
        while len(pushed) < 3 or (
            len(pushed) < MOST_PUSHES and not fired_points(stage.home) >= {*WEBHOOK}
        ):
            pushed.append(team.push(message=f"push {len(pushed)}"))
            team.ends(pushed[-1], within_s=200)
        runs = [team.workspace.wait_for_run(sha)["run"] for sha in pushed]
        hashes = {final_adapter(running.wait(run, "finished")) for run in runs}
        shown = running.get("/runs", limit=50)["runs"]
        assert sorted(run["id"] for run in shown) == sorted(runs)
        calm = running.submit(run_config(**STEPS), workspace=team.workspace.id)
        hashes.add(final_adapter(running.wait(calm, "finished")))
    assert len(hashes) == 1
