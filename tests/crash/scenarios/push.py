"""kill -9 of the control process at every point of what follows a push: one run, and the same bits."""

from infra.failpoints import CONSUMERS, runtime_points
from tests.kit.kills import Stage, arm, once
from tests.kit.ledger import check
from tests.kit.platform import final_adapter
from tests.kit.pushed_workspace import toml_of
from tests.kit.team import team_of

FILES = {
    "headrace.toml": '[[trigger]]\nbranches = ["train"]\nconfig = "x.toml"\n',
    "x.toml": toml_of(advanced={"max_steps": 3}),
}
SUBMIT = once("submit.before_commit", "submit.after_commit")
TRIGGER_INTAKE = once(*runtime_points("trigger", ()))
TRIGGER_PERFORM = once(*runtime_points("trigger", CONSUMERS["trigger"])[len(TRIGGER_INTAKE) :])
STATUS = once(*runtime_points("status", CONSUMERS["status"]))


def act(stage: Stage) -> str:
    """Push once, and return the hash of the only run's last checkpoint."""
    with team_of(stage.root, FILES, environment=arm(stage.points)) as team:
        sha = team.push("train", {"note": "one"})
        run = team.find("submitted", sha)["run"]
        info = team.platform.wait(run, "finished", within_s=300)
        team.find("settled", sha)
        shown = team.statuses(run)
        check(team.platform.events(run), steps=3, groups=2, samples=4)
        runs = team.platform.get("/runs", limit=50)["runs"]
        kinds = [kind for kind, _ in team.events() if kind.startswith("rl.trigger.")]
    assert [one["id"] for one in runs] == [run]
    assert sorted(kinds) == sorted(
        f"rl.trigger.{kind}" for kind in ("push-examined", "fired", "submitted", "settled")
    )
    assert shown[-1] == "success"
    assert shown.count("success") == 1, "one final status"
    return final_adapter(info)
