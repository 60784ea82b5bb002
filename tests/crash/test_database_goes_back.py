"""A copy of the database's files is put back under living processes: what they read since is gone.
They notice, start again from what the database says, and the run ends with the bits of a calm one."""

import asyncio
import shutil
from pathlib import Path

import pytest

from infra.spine.postgres.history import HistoryChanged, as_of
from infra.spine.postgres.migrate import migrate
from infra.spine.postgres.pool import connect
from tests.crash.test_database_restarts import _workers_started
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

STEPS = 40
LOST_STEPS = 3
"""So many steps are taken after the copy, and gone when it is put back."""

CONFIG = run_config(
    advanced={"max_steps": STEPS, "state_interval": 2 * STEPS},
    checkpoints={"checkpoint_save_freq": 1},
)
"""No version is discarded: each is a checkpoint, and recovery replays from the first. The bytes of
versions are not in the database; one that goes back would need those that were discarded since."""


def copy_files(server: PostgresServer, source: Path, target: Path) -> None:
    """The database's files, copied while nobody writes them, with their owners."""
    server.stop("fast")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=shutil.copy2)
    _give(target, source)
    server.start()


def _give(tree: Path, like: Path) -> None:
    """The files belong to who owns `like`."""
    owner = like.stat()
    for path in (tree, *tree.rglob("*")):
        shutil.chown(path, owner.st_uid, owner.st_gid)
    tree.chmod(0o700)


def current_step(running: Platform, run: str) -> int:
    return int(running.info(run)["run"]["current_step"] or 0)


def at_step(running: Platform, run: str, step: int) -> None:
    def there() -> bool | None:
        return True if current_step(running, run) >= step else None

    eventually(there, within_s=120, what=f"step {step}")


def steps_recorded_at(running: Platform, run: str) -> dict[str, str]:
    """Of each step that was taken: event id -> the time of the transaction that recorded it."""
    return {
        event["id"]: event["time"]
        for event in running.events(run)
        if event["type"] == "rl.policy.updated"
    }


def test_a_run_ends_though_the_database_went_back(
    own_server: PostgresServer, tmp_path: Path
) -> None:
    asyncio.run(execute(own_server.url, "create database headrace"))
    url = database_of(own_server.url, "headrace")
    workspace = make_workspace(tmp_path / "workspace")
    kept = own_server.data.with_name("kept")
    with platform(tmp_path / "home", environment={"HEADRACE_DATABASE_URL": url}) as running:
        running.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
        running.upload("numbers")
        calm = running.submit(CONFIG, workspace="w", name="calm")
        undisturbed = final_adapter(running.wait(calm, "finished", within_s=300))
        restarts = _workers_started(running)
        run = running.submit(CONFIG, workspace="w", name="back")
        at_step(running, run, 2)
        copy_files(own_server, own_server.data, kept)
        at_step(running, run, current_step(running, run) + LOST_STEPS)
        before = steps_recorded_at(running, run)
        copy_files(own_server, kept, own_server.data)
        info = running.wait(run, "finished", within_s=300)
        assert final_adapter(info) == undisturbed
        check(running.events(run), steps=STEPS, groups=2, samples=4)
        after = steps_recorded_at(running, run)
        lost = [id for id, time in before.items() if after.get(id) != time]
        assert len(lost) >= LOST_STEPS, "the steps after the copy were not lost"
        assert _workers_started(running) == restarts, "processes outlive it"


async def test_reads_from_before_a_restart_of_the_database_are_not_used(
    own_server: PostgresServer,
) -> None:
    """Each connection to a server that was started again is asked who it is, before it is used."""
    await migrate(own_server.url)
    async with connect(own_server.url) as database:
        epoch = database.history.history_epoch
        with as_of(epoch):
            assert await database.lazy.fetchval("select 1") == 1
        await asyncio.to_thread(own_server.stop, "fast")
        await asyncio.to_thread(own_server.start)
        for pool in (database.lazy, database.durable):
            with as_of(epoch), pytest.raises(HistoryChanged):
                await pool.fetchval("select 1")
            assert await pool.fetchval("select 1") == 1
        assert database.history.history_epoch == epoch + 1
