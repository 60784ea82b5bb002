"""kill -9 at the numbered steps of every consumer: same bits, nothing lost, nothing twice.

All points are armed in one run; each fires once, in whichever process passes it, and the supervisor
restarts what died.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.kit.ledger import check
from tests.kit.platform import Platform, final_adapter, make_workspace, platform, run_config

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

POINTS = {
    "sync": ("intake.decided", "perform.FetchCommit.effect_done", "intake.tx_after_commit"),
    "run": ("intake.decided", "intake.tx_before_commit", "intake.tx_after_commit"),
    "rollout": (
        "perform.GenerateSample.claimed",
        "perform.GenerateSample.effect_done",
        "perform.GenerateSample.tx_after_commit",
    ),
    "grade": (
        "perform.GradeGroup.claimed",
        "perform.GradeGroup.tx_before_commit",
        "perform.GradeGroup.tx_after_commit",
    ),
    "learn": (
        "perform.TrainStep.claimed",
        "perform.TrainStep.effect_done",
        "perform.TrainStep.tx_after_commit",
    ),
    "checkpoint": (
        "perform.SaveCheckpoint.claimed",
        "perform.SaveCheckpoint.effect_done",
        "perform.SaveCheckpoint.tx_before_commit",
    ),
    "evaluate": ("intake.decided", "intake.tx_before_commit", "intake.tx_after_commit"),
}

LATER = {"learn.perform.TrainStep.effect_done": 2, "run.intake.tx_after_commit": 4}
"""Points that fire at a later pass than the first, so that steps are replayed from an older state."""

CONFIG = run_config(
    advanced={"max_steps": 6, "validation_dataset": "numbers", "state_interval": 2},
    checkpoints={"eval_interval": 3},
)


def run_once(root: Path, failpoints: str) -> tuple[str, list[dict[str, Any]], set[str]]:
    """One run of CONFIG; its final hash, its events, and the points that fired."""
    workspace = make_workspace(root / "workspace")
    with platform(root / "home", environment={"HEADRACE_FAILPOINT": failpoints}) as started:
        run = _start(started, workspace)
        info = started.wait(run, "finished", within_s=400)
        events = started.events(run)
    fired = root / "home" / "failpoints"
    return (
        final_adapter(info),
        events,
        {marker.name for marker in fired.iterdir()} if fired.exists() else set(),
    )


def _start(started: Platform, workspace: Path) -> str:
    started.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
    started.upload("numbers")
    return started.submit(CONFIG, workspace="w")


def test_kills_at_three_points_of_every_consumer_change_nothing(tmp_path: Path) -> None:
    armed = {
        f"{consumer}.{point}": LATER.get(f"{consumer}.{point}", 1)
        for consumer, points in POINTS.items()
        for point in points
    }
    undisturbed, events, none = run_once(tmp_path / "calm", "")
    assert not none
    check(events, steps=6, groups=2, samples=4)
    text = ",".join(f"{name}:{hit}" for name, hit in armed.items())
    killed, events, fired = run_once(tmp_path / "killed", text)
    assert fired == set(armed), f"these never fired: {set(armed) - fired}"
    check(events, steps=6, groups=2, samples=4)
    assert killed == undisturbed
