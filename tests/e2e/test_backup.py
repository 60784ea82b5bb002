"""A backup taken in the middle of a run, restored into a fresh place: the run goes on there, to the same
bits as the one that was never touched."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.kit.ledger import check
from tests.kit.platform import (
    GRADER_ONLY,
    Platform,
    eventually,
    final_adapter,
    make_workspace,
    platform,
    platform_environment,
    run_config,
)
from tests.kit.stacks import on_every_stack, stack_settings

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

STEPS = 10
CONFIG = run_config(advanced={"max_steps": STEPS})
FILES = {"rollouts/say/main.py": GRADER_ONLY}


def headrace(environment: Mapping[str, str], *arguments: str, code: int = 0) -> Any:
    """Run a command; returns the JSON that it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "producers.cli.main", *arguments, "--json"],
        env=dict(environment),
        capture_output=True,
        check=False,
    )
    assert done.returncode == code, done.stderr.decode()
    return json.loads(done.stdout)


@contextmanager
def frozen(started: Platform) -> Iterator[None]:
    """The worker stands still in the middle of what it does, for as long as the block lasts."""
    state = json.loads((started.home / "supervisor.json").read_text())
    (pid,) = (child["pid"] for child in state["children"] if child["name"] == "worker")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.kills
@pytest.mark.parametrize("stack", on_every_stack)
def test_a_run_goes_on_from_a_backup_to_the_same_bits(
    request: pytest.FixtureRequest, tmp_path: Path, stack: str
) -> None:
    first, second = (stack_settings(request, stack) for _ in range(2))
    workspace, target = make_workspace(tmp_path / "workspace", FILES), tmp_path / "backup"
    with platform(tmp_path / "old", environment=first) as started:
        started.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
        started.upload("numbers")
        run = started.submit(CONFIG, workspace="w")
        eventually(
            lambda: (started.info(run)["run"]["current_step"] or 0) >= 1 or None,
            within_s=120,
            what="a step",
        )
        with frozen(started):
            taken = headrace(started.environment, "backup", str(target))
        untouched = started.wait(run, "finished")
        events = started.events(run)
    assert taken["faults"] == []
    backed_up = (target / "tables" / "events").read_text()
    assert "rl.policy.updated" in backed_up
    assert "rl.run.finished" not in backed_up, "the run was over before the backup was taken"
    assert (target / "tables" / "effects").read_text(), "nothing was being done at that moment"

    new = platform_environment(tmp_path / "new", second)
    assert headrace(new, "restore", str(target))["events"] == taken["events"]
    with platform(tmp_path / "new", environment=second) as restored:
        went_on = restored.wait(run, "finished")
        check(restored.events(run), steps=STEPS, groups=2, samples=4)
        assert final_adapter(went_on) == final_adapter(untouched)
        assert len(restored.events(run)) == len(events)
        sound = headrace(restored.environment, "doctor", "--deep")
        assert sound["ok"] is True
        assert sound["damages"] == []
        assert sound["events"] > len(events)
    if stack == "embedded":
        _a_damage_is_named(restored, went_on["checkpoints"][-1]["uri"])


def _a_damage_is_named(stopped: Platform, manifest: str) -> None:
    """Also where nothing runs."""
    Path(unquote(urlsplit(manifest).path)).write_bytes(b"{}")
    looked = headrace(stopped.environment, "doctor", "--deep", code=1)
    assert [(d["kind"], d["what"]) for d in looked["damages"]] == [("damaged-blob", manifest)]
