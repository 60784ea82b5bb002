"""kill -9 of the control process at every point of what follows a push: one run, and the same bits."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from infra.failpoints import CONSUMERS, runtime_points
from tests.kit.ledger import check
from tests.kit.platform import final_adapter
from tests.kit.pushed_workspace import toml_of
from tests.kit.team import team_of

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

FILES = {
    "headrace.toml": '[[trigger]]\nbranches = ["train"]\nconfig = "x.toml"\n',
    "x.toml": toml_of(advanced={"max_steps": 3}),
}
POINTS = {
    "submit": ("submit.before_commit", "submit.after_commit"),
    "trigger.intake": runtime_points("trigger", ()),
    "trigger.perform": runtime_points("trigger", CONSUMERS["trigger"])[
        len(runtime_points("trigger", ())) :
    ],
    "status": runtime_points("status", CONSUMERS["status"]),
}


def pushed(root: Path, points: Sequence[str]) -> str:
    """Push once, and return the hash of the only run's last checkpoint."""
    root.mkdir()
    armed = ",".join(f"{point}:1" for point in points)
    with team_of(root, FILES, environment={"HEADRACE_FAILPOINT": armed}) as team:
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
    markers = root / "home" / "failpoints"
    fired = {marker.name for marker in markers.iterdir()} if markers.exists() else set()
    assert fired == set(points), f"these never fired: {set(points) - fired}"
    return final_adapter(info)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return pushed(tmp_path_factory.mktemp("calm") / "calm", ())


@pytest.mark.parametrize("group", POINTS)
def test_kills_change_neither_the_run_nor_its_bits(
    tmp_path: Path, undisturbed: str, group: str
) -> None:
    assert pushed(tmp_path / "killed", POINTS[group]) == undisturbed
