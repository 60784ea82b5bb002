"""The clocks of all our processes jump by an hour in the middle of a run, forth and back twice as far
(`faketime`, by a file that they read at each look at the clock): nothing is lost, no lease is lost or
outlives its worker, and the bits are the same. The database keeps its own time, and only that counts."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from infra.spine.postgres.lease import LEASE_S
from tests.kit.ledger import check
from tests.kit.platform import (
    ROOT,
    Platform,
    eventually,
    final_adapter,
    make_workspace,
    platform,
    run_config,
)
from tests.kit.postgres import fresh_database, missing

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

STEPS = 10
CONFIG = run_config(advanced={"max_steps": STEPS}, checkpoints={"checkpoint_save_freq": 2})
LIBRARY = "libfaketimeMT.so.1"
HOUR_S = 3600
MEASURED = {"time/generate_s", "time/grade_s", "time/learn_s", "time/publish_s", "time/wait_s"}
"""Durations within one process, and what lies between two of them, by the database's clock."""


def library() -> Path:
    """The library that stands between a process and its clock, or a skip."""
    for found in Path("/usr/lib").glob(f"*/faketime/{LIBRARY}"):
        return found
    missing(f"no {LIBRARY}: apt-get install faketime")
    raise AssertionError


SLEEP = """
import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""
"""A module that Python imports when it starts (`sitecustomize`). The library refuses the system call of
`time.sleep`, which sleeps by the monotonic clock, with EINVAL."""


class Clocks:
    """The wall clocks of the processes that are started with `environment`."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "clock"
        self.jump(0)
        (directory / "start").mkdir()
        (directory / "start" / "sitecustomize.py").write_text(SLEEP)
        self.environment = {
            "PYTHONPATH": f"{directory / 'start'}:{ROOT}",
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }

    def jump(self, to_s: int) -> None:
        """To so many seconds before or after the true time, for everybody at once."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{to_s:+d}\n")
        fresh.rename(self._file)

    def shown(self) -> float:
        """The time as a process sees it."""
        told = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time())"],
            env={**os.environ, **self.environment},
            check=True,
            capture_output=True,
        )
        return float(told.stdout)


async def asked(url: str, sql: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


def longest_lease_s(url: str) -> float:
    """By the database's clock."""
    sql = "select max(extract(epoch from expires_at - clock_timestamp()))::float8 from workers"
    found = asyncio.run(asked(url, sql))
    assert isinstance(found, float)
    return found


def stepped(started: Platform, run: str, step: int) -> None:
    eventually(
        lambda: (started.info(run)["run"]["current_step"] or 0) >= step or None,
        within_s=300,
        what=f"step {step}",
    )


def test_an_hour_forth_and_two_back_change_nothing(embedded_url: str, tmp_path: Path) -> None:
    clocks = Clocks(tmp_path)
    workspace = make_workspace(tmp_path / "workspace")
    with (
        fresh_database(embedded_url) as url,
        platform(
            tmp_path / "home", environment={"HEADRACE_DATABASE_URL": url, **clocks.environment}
        ) as started,
    ):
        started.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
        started.upload("numbers")
        calm = started.submit(CONFIG, workspace="w", name="calm")
        undisturbed = final_adapter(started.wait(calm, "finished", within_s=300))
        workers = asyncio.run(asked(url, "select count(*) from workers"))
        run = started.submit(CONFIG, workspace="w", name="shaken")
        true = clocks.shown()
        for step, to_s in ((1, HOUR_S), (2, -HOUR_S)):
            stepped(started, run, step)
            clocks.jump(to_s)
            assert abs(clocks.shown() - true - to_s) < HOUR_S / 2, "no clock has jumped"
            stepped(started, run, step + 1)
            assert longest_lease_s(url) <= LEASE_S
        info = started.wait(run, "finished", within_s=300)
        assert final_adapter(info) == undisturbed
        check(started.events(run), steps=STEPS, groups=2, samples=4)
        assert asyncio.run(asked(url, "select count(*) from workers")) == workers, (
            "a lease was lost"
        )
        durations = [
            value
            for event in started.events(run)
            if event["type"] == "rl.step.settled"
            for name, value in event["data"]["metrics"].items()
            if name in MEASURED
        ]
        assert len(durations) >= len(MEASURED) * STEPS
        assert all(0 <= seconds < HOUR_S / 2 for seconds in durations), durations
