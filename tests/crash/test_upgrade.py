"""An upgrade by one release, with kills, and the way back: runs that began before it end with the same
bits, and those that began after it wait for the newer release and are lost by neither."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import pytest

from tests.kit.ledger import check
from tests.kit.next_release import make_next_release, make_release
from tests.kit.platform import (
    Platform,
    eventually,
    final_adapter,
    make_workspace,
    platform,
    run_config,
    verify,
)

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

STEPS = 8
CONFIG = run_config(advanced={"max_steps": STEPS, "state_interval": 2})
KILLS = 4

NEWER = {"rl.run.noted", "rl.run.requested"}
"""Types whose newest version only the next release knows."""


class Releases:
    """Starts platforms of both releases on one database and one store."""

    def __init__(self, root: Path, database_url: str) -> None:
        self._root = root
        self.database_url = database_url
        self._next = make_next_release(root / "next")

    @contextmanager
    def old(self, name: str) -> Iterator[Platform]:
        with self._started(name, {}) as running:
            yield running

    @contextmanager
    def new(self, name: str) -> Iterator[Platform]:
        with self.of(name, self._next) as running:
            yield running

    @contextmanager
    def of(self, name: str, packages: Path) -> Iterator[Platform]:
        path = {"PYTHONPATH": str(packages), "PYTHONSAFEPATH": "1"}
        with self._started(name, path) as running:
            yield running

    @contextmanager
    def _started(self, name: str, environment: Mapping[str, str]) -> Iterator[Platform]:
        settings = {
            "HEADRACE_DATABASE_URL": self.database_url,
            "HEADRACE_BLOBS": f"file://{self._root}/blobs",
            **environment,
        }
        with platform(self._root / name, environment=settings) as running:
            yield running

    def fetch(self, query: str, *values: object) -> list[Any]:
        async def ask() -> list[Any]:
            connection = await asyncpg.connect(self.database_url)
            try:
                return list(await connection.fetch(query, *values))
            finally:
                await connection.close()

        return asyncio.run(ask())

    def steps(self, run: str) -> int:
        """How many steps of a run are settled."""
        query = (
            "select count(*) as steps from events where run_id = $1 and type = 'rl.step.settled'"
        )
        return int(self.fetch(query, run)[0]["steps"]) - 1

    def events(self, run: str) -> list[tuple[str, int]]:
        query = "select type, schema_version from events where run_id = $1 order by xid, position"
        return [(row["type"], row["schema_version"]) for row in self.fetch(query, run)]

    def until_step(self, run: str, step: int) -> None:
        eventually(
            lambda: self.steps(run) >= step or None, within_s=120, what=f"step {step} of {run}"
        )


def kill_some(running: Platform, draw: random.Random) -> None:
    """kill -9 to one of the workers of a platform. Its supervisor starts it again."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        found = [
            child.pid
            for child in psutil.Process(running.process.pid).children(recursive=True)
            if "consumers" in " ".join(child.cmdline())
        ]
        os.kill(draw.choice(found), signal.SIGKILL)


def end_abruptly(running: Platform) -> None:
    """kill -9 to a supervisor. Its children end with it."""
    running.process.kill()
    running.process.wait(60)


def test_runs_go_through_an_upgrade_and_back_with_kills(tmp_path: Path, database_url: str) -> None:
    workspace = make_workspace(tmp_path / "workspace")
    releases, draw = Releases(tmp_path, database_url), random.Random(7)
    with releases.old("old") as old:
        old.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
        old.upload("numbers")
        before = old.submit(CONFIG, workspace="w")
        with releases.new("new") as new:
            after = new.submit(CONFIG, workspace="w")
            for step in range(1, KILLS + 1):
                kill_some(draw.choice([old, new]), draw)
                releases.until_step(after, step)
            end_abruptly(new)
        stood = releases.events(after)
        assert ("rl.run.noted", 1) in stood
        assert ("rl.run.requested", 2) in stood
        # the release before goes on with what it knows
        kill_some(old, draw)
        calm = old.submit(CONFIG, workspace="w")
        bits = {final_adapter(old.wait(run, "finished")) for run in (before, calm)}
        for run in (before, calm):
            assert {version for _, version in releases.events(run)} == {1}
            check(old.events(run), steps=STEPS, groups=2, samples=4)
        # and leaves the rest
        assert releases.events(after) == stood
        eventually(
            lambda: _says_that_it_waits(old, after) or None,
            within_s=30,
            what="the leases of newer workers run out, and the status says that the run waits",
        )
        with releases.new("again") as again:
            eventually(lambda: releases.steps(after) >= STEPS or None, within_s=120, what="the end")
            ended = again.wait(after, "finished")
            check(again.events(after), steps=STEPS, groups=2, samples=4)
        bits.add(final_adapter(ended))
    assert len(bits) == 1
    assert releases.fetch("select type from events where type like 'rl.dead-letter%'") == []


def test_a_run_of_rules_6_goes_on_and_is_verified(tmp_path: Path, database_url: str) -> None:
    """Its hashes are those of files to the end. A run of today has the same weights under other hashes,
    which are those of tensors."""
    workspace = make_workspace(tmp_path / "workspace")
    releases = Releases(tmp_path, database_url)
    rules = ("schemas/learner.py", "RULES = 7\n", "RULES = 6\n")
    with releases.of("before", make_release(tmp_path / "rules", (rules,))) as before:
        before.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
        before.upload("numbers")
        old = before.submit(CONFIG, workspace="w")
        releases.until_step(old, 3)
        kill_some(before, random.Random(7))
        releases.until_step(old, 4)
        end_abruptly(before)
    with releases.old("after") as after:
        new = after.submit(CONFIG, workspace="w")
        assert final_adapter(after.wait(old, "finished")) == final_adapter(
            after.wait(new, "finished")
        )
        for run, rules_of_run in ((old, "6"), (new, "7")):
            check(after.events(run), steps=STEPS, groups=2, samples=4)
            versions = _versions(after, run)
            assert {version["versions"]["rules"] for version in versions} == {rules_of_run}
            for state in (version["state"] for version in versions):
                for part in ("weights", "state"):
                    if state[part] is not None:
                        is_file = state[part]["sha256"] == state[f"{part}_sha256"]
                        assert is_file == (run == old)
            assert verify(after, run)["status"] == "verified"


def _versions(running: Platform, run: str) -> list[Any]:
    types = {"rl.policy.initialized", "rl.policy.updated"}
    return [event["data"] for event in running.events(run) if event["type"] in types]


def _says_that_it_waits(running: Platform, run: str) -> bool:
    waits = [wait["message"] for wait in running.get("/status")["waiting_for"]]
    return any(f"run {run} began under a newer release" in wait for wait in waits)
