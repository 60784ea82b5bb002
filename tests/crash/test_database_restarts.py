"""Postgres crashes again and again under a run: nothing is lost, nothing done twice, the bits are the
same, and the API says 503 or the truth. HEADRACE_RESTARTS says how often (three times by default)."""

import asyncio
import json
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from tests.kit.ledger import check
from tests.kit.platform import (
    Platform,
    eventually,
    final_adapter,
    make_workspace,
    platform,
    run_config,
)
from tests.kit.postgres import database_of, execute
from tests.stack.postgres import PostgresServer

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

RESTARTS = int(os.environ.get("HEADRACE_RESTARTS", "3"))
STEPS = 2 * RESTARTS + 2
CONFIG = run_config(advanced={"max_steps": STEPS}, checkpoints={"checkpoint_save_freq": 4})


@dataclass
class Watcher:
    """Asks the API all the time, and remembers what it was told."""

    api: httpx.Client
    run: str
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    step: int = 0
    furthest: int = 0

    def watch(self) -> None:
        while not self.stop.is_set():
            try:
                self._look(self.api.get(f"/runs/{self.run}"))
            except httpx.TransportError as error:
                self.wrong.append(f"the API itself was gone: {error!r}")
            time.sleep(0.02)

    def has_reached(self, step: int) -> bool | None:
        """For `eventually`: whether the run was seen at this step."""
        return self.furthest >= step or None

    def _look(self, answer: httpx.Response) -> None:
        self.statuses[answer.status_code] += 1
        if answer.status_code == 503:
            if not answer.headers.get("Retry-After") or answer.json()["code"] != "UNAVAILABLE":
                self.wrong.append(f"a 503 without what it should say: {answer.text}")
            self.step = 0  # the tables are written lazily: a crash may take them back for a moment
            return
        if answer.status_code != 200:
            self.wrong.append(f"{answer.status_code}: {answer.text}")
            return
        run = answer.json()["run"]
        if run["id"] != self.run or (run["current_step"] or 0) < self.step:
            self.wrong.append(f"it went back: {run}")
        self.step = run["current_step"] or 0
        self.furthest = max(self.furthest, self.step)


def crash(server: PostgresServer) -> None:
    """As if it was killed; started again at once."""
    server.stop("immediate")
    server.start()


def test_a_run_through_crashes_of_the_database_ends_with_the_same_bits(
    own_server: PostgresServer, tmp_path: Path
) -> None:
    asyncio.run(execute(own_server.url, "create database headrace"))
    url = database_of(own_server.url, "headrace")
    workspace = make_workspace(tmp_path / "workspace")
    with platform(tmp_path / "home", environment={"HEADRACE_DATABASE_URL": url}) as started:
        started.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
        started.upload("numbers")
        calm = started.submit(CONFIG, workspace="w", name="calm")
        undisturbed = final_adapter(started.wait(calm, "finished", within_s=300))
        restarts = _workers_started(started)
        run = started.submit(CONFIG, workspace="w", name="shaken")
        watcher = Watcher(started.api, run)
        thread = threading.Thread(target=watcher.watch)
        thread.start()
        try:
            for number in range(RESTARTS):
                eventually(
                    partial(watcher.has_reached, 2 * number),
                    within_s=120,
                    what=f"step {2 * number} after {number} crashes ({watcher.wrong[:3]})",
                )
                crash(own_server)
            info = started.wait(run, "finished", within_s=300)
        finally:
            watcher.stop.set()
            thread.join()
        assert final_adapter(info) == undisturbed
        check(started.events(run), steps=STEPS, groups=2, samples=4)
        assert not watcher.wrong, watcher.wrong[:5]
        assert watcher.statuses[503] > 0, "the crashes were not even noticed"
        assert _workers_started(started) == restarts, "processes outlive a crash of the database"
        _answers_writes(started)


def _workers_started(started: Platform) -> int:
    """How often the processes of the platform were started."""
    state = json.loads((started.home / "supervisor.json").read_text())
    return sum(child["starts"] for child in state["children"])


def _answers_writes(started: Platform) -> None:
    answer = started.post("/datasets", {"name": uuid4().hex, "file_name": "x.jsonl"})
    assert answer.status_code == 201
