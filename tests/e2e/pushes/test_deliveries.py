"""Deliveries ten times, in any order, or none at all: the same pushes make the same runs.

The protection is that a delivery is only a hint, and that a listing is compared with the heads that are
known. With that comparison switched off, the same push makes a run again.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from producers.cli.demo import post_receive
from tests.kit.platform import ROOT, Platform, eventually, git, platform
from tests.kit.pushed_workspace import (
    CONFIG,
    PushedWorkspace,
    commit,
    make_bare,
    make_clone,
    toml_of,
)

pytestmark = [pytest.mark.processes, pytest.mark.postgres, pytest.mark.torch, pytest.mark.slow]

MAIN = "refs/heads/main"
SHORT = {CONFIG: toml_of(training={"rollout_batch_size": 1}, advanced={"max_steps": 1})}

WITHOUT_COMPARISON = """
import sys
sys.path.insert(0, {root!r})
from tests.known_bugs.known_bug import KnownBug, put_in

bug = put_in(KnownBug(
    bug="a listing is not compared with the known heads",
    seen="",
    code="consumers.sync.refs:_compare",
    old="if before == after:",
    new="if before == after and is_baseline:",
    test="",
))
bug.__enter__()
"""
"""A module that Python imports when it starts (`sitecustomize`)."""


@dataclass
class Team:
    clone: Path
    workspace: PushedWorkspace
    earlier: frozenset[str]
    """The runs that the platform had before."""

    def push(self) -> tuple[str, str]:
        """Push an empty commit. Returns the commits before and after."""
        before = git(self.clone, "rev-parse", "HEAD")
        after = commit(self.clone, message=f"push {uuid4()}")
        git(self.clone, "push", "-q", "origin", "main")
        return before, after

    def deliver(self, pushes: Sequence[tuple[str, str]]) -> None:
        url, secret = self.workspace.hook["url"], self.workspace.hook["secret"]
        for before, after in pushes:
            said = post_receive.deliver(url, secret, before, after, MAIN)
            assert said.startswith("202"), said

    def settled(self) -> None:
        """Wait until no delivery waits for an answer of the repository, or for its commit."""

        def look() -> bool | None:
            results = [entry["result"] for entry in self.workspace.entries()]
            waits = any("waits until" in one or "being examined" in one for one in results)
            return None if waits else True

        eventually(look, within_s=60, what="all deliveries led somewhere", every_s=0.1)

    def runs(self) -> list[str]:
        """The runs of all pushes, in order, once they have ended."""
        self.settled()
        found = self.workspace.platform.get("/runs", limit=200)["runs"]
        shown = [run for run in found if run["id"] not in self.earlier]
        for run in shown:
            self.workspace.platform.wait(run["id"], "finished")
        return sorted(run["name"] for run in shown)


def started(root: Path, running: Platform) -> Team:
    clone = make_clone(root / "clone", SHORT)
    bare = make_bare(clone, root / "pushed.git")
    earlier = frozenset(run["id"] for run in running.get("/runs", limit=200)["runs"])
    name = f"pushed-{uuid4().hex[:8]}"
    found = PushedWorkspace.connect(running, str(bare), name=name, forge="none")
    return Team(clone, found, earlier)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    home = tmp_path_factory.mktemp("deliveries") / "home"
    with platform(home, environment={"HEADRACE_POLL_S": "0"}) as found:
        found.upload("numbers")
        yield found


@pytest.fixture
def team(running: Platform, tmp_path: Path) -> Team:
    return started(tmp_path, running)


def wait_for_runs(team: Team, pushes: Sequence[tuple[str, str]]) -> list[str]:
    return [team.workspace.wait_for_run(after)["run_name"] for _, after in pushes]


def test_ten_times_each_in_any_order_is_one_run_for_each_push(team: Team) -> None:
    pushes = []
    for _ in range(3):
        pushes.append(team.push())
        team.deliver(pushes[-1:] * 10)
        wait_for_runs(team, pushes)
    late = pushes * 10
    random.Random(0).shuffle(late)
    team.deliver(late)
    assert team.runs() == sorted(wait_for_runs(team, pushes))


def test_a_delivery_of_commits_that_nobody_pushed_is_no_run(team: Team) -> None:
    team.deliver([("a" * 40, "b" * 40), ("b" * 40, "a" * 40)])
    team.settled()
    assert team.runs() == []
    assert "had moved on" in team.workspace.entries()[0]["result"]


def test_a_repeated_delivery_makes_two_runs_without_the_comparison(tmp_path: Path) -> None:
    """The twin."""
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(WITHOUT_COMPARISON.format(root=str(ROOT)))
    environment = {"HEADRACE_POLL_S": "0", "PYTHONPATH": f"{patch}:{ROOT}"}
    with platform(tmp_path / "home", environment=environment) as running:
        running.upload("numbers")
        team = started(tmp_path, running)
        push = team.push()
        team.deliver([push])

        def twice() -> bool | None:
            team.deliver([push])
            found = running.get("/runs", limit=50)["runs"]
            return True if len(found) > 1 else None

        eventually(twice, within_s=60, what="the same push made a second run", every_s=0.5)
