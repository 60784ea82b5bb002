"""Each protection, and its twin: with the protection switched off, the same check must fail.

Real processes, killed or stopped; the protection is switched off in the test's own database (or blobs),
never by a setting that could be left on. Those that wait for processes and leases wait at once.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from consumers.checkpoint import perform
from infra.blobs.local import LocalBlobs
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import connect
from schemas.effects import SaveCheckpoint
from schemas.events import CheckpointFailed, RunWarned
from schemas.ids import ConsumerName
from tests.kit.at_once import AtOnce
from tests.kit.fakes import bench
from tests.kit.platform import ROOT
from tests.kit.specs import checkpoint_spec, version

pytestmark = [pytest.mark.processes, pytest.mark.postgres]

at_once = AtOnce()

INBOX = "insert into inbox (consumer, event_id) select * from unnest(p_consumers, p_consumed);"
PASSED = "raise exception '%', lost using errcode = 'HR004';"
FENCE = "raise exception '%', lost using errcode = 'HR002';"


async def switched_off(url: str, protection: str) -> None:
    """Take one statement out of commit_decision in this database."""
    connection = await asyncpg.connect(url)
    source = await connection.fetchval(
        "select pg_get_functiondef(oid) from pg_proc where proname = 'commit_decision'"
        " order by pronargs desc limit 1"
    )
    assert source.count(protection) == 1, "the statement is not where it was"
    await connection.execute(source.replace(protection, "null;"))
    await connection.close()


async def counted(url: str, run: str, step: int) -> int:
    """How often the stateless consumer's event is in the log."""
    async with connect(url, size=1) as database, Notifier(database) as notifier:
        events = await PostgresLog(database, notifier).read(run, after=Cursor(), limit=100)
    return sum(
        r.event.type == "rl.checkpoint.failed" and getattr(r.event, "step", 0) == step
        for r in events
    )


async def warn(url: str, run: str) -> None:
    async with connect(url, size=1) as database, Notifier(database) as notifier:
        event = RunWarned(run=run, step=1, message="look")
        await PostgresLog(database, notifier).append([event], cause=uuid4())


async def reached(what: Callable[[], Awaitable[bool]], *, within_s: float = 90.0, why: str) -> None:
    deadline = time.monotonic() + within_s
    while not await what():
        assert time.monotonic() < deadline, why
        await asyncio.sleep(0.05)


def started(
    url: str, home: Path, go: Path, failpoint: str = "", *, effects_only: bool = False
) -> "subprocess.Popen[bytes]":
    settings = {"HEADRACE_FAILPOINT": failpoint, "STATELESS_EFFECTS_ONLY": str(int(effects_only))}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.crash.stateless_consumer", url, str(home), str(go)],
        cwd=ROOT,
        env={**os.environ, **settings, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )


async def killed_after_its_commit(url: str, tmp_path: Path) -> int:
    """A worker dies between its commit and its acknowledgement; how often was the message counted?"""
    run, go = uuid4().hex, tmp_path / "go"
    go.touch()
    await warn(url, run)
    first = started(url, tmp_path, go, "stateless.intake.tx_after_commit:1")
    assert await asyncio.to_thread(first.wait, 30) == -signal.SIGKILL
    second = started(url, tmp_path, go)
    try:
        await reached(lambda: _both_done(url, run), why="the second worker took the work up")
        await warn(url, marker := uuid4().hex)
        await reached(lambda: _both_done(url, marker), why="the second worker reached the marker")
    finally:
        second.kill()
        second.wait(60)
    return await counted(url, run, 1)


async def _both_done(url: str, run: str) -> bool:
    return await counted(url, run, 2) >= 1


@at_once
async def test_a_message_is_counted_once_through_a_kill(database_url: str, tmp_path: Path) -> None:
    assert await killed_after_its_commit(database_url, tmp_path) == 1


@at_once
async def test_twin_without_the_inbox_it_is_counted_twice(
    database_url: str, tmp_path: Path
) -> None:
    await switched_off(database_url, INBOX)
    assert await killed_after_its_commit(database_url, tmp_path) > 1


async def stopped_for_longer_than_its_lease(url: str, tmp_path: Path, *, settle_s: float) -> int:
    """A worker stops (SIGSTOP) with an effect in hand; an heir finishes it; the zombie goes on and
    finishes too. How often was the outcome taken, at the latest after `settle_s`?"""
    run, never, go = uuid4().hex, tmp_path / "go-zombie", tmp_path / "go-heir"
    await warn(url, run)
    zombie = started(url, tmp_path, never)
    heir = None
    try:
        await reached(lambda: _claimed(url), why="the first worker holds the effect")
        zombie.send_signal(signal.SIGSTOP)
        await _expire_all(url)
        go.touch()
        heir = started(url, tmp_path, go)
        await reached(lambda: _both_done(url, run), why="the heir finished the effect")
        never.touch()
        zombie.send_signal(signal.SIGCONT)
        await reached(lambda: _woken(zombie), why="the zombie goes on")
        await _settles(url, run, within_s=settle_s)
    finally:
        for process in (zombie, heir):
            if process is not None:
                process.kill()
                process.wait(60)
    return await counted(url, run, 2)


async def _claimed(url: str) -> bool:
    connection = await asyncpg.connect(url)
    held = await connection.fetchval("select count(*) from effects where worker is not null")
    await connection.close()
    return bool(held)


async def _expire_all(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("update workers set expires_at = clock_timestamp()")
    await connection.close()


async def _woken(process: "subprocess.Popen[bytes]") -> bool:
    state = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state != "T"


async def _settles(url: str, run: str, *, within_s: float) -> None:
    """Until the zombie's outcome was taken too, which the protection never lets happen; the zombie polls
    its file every 20 ms."""
    deadline = time.monotonic() + within_s
    while await counted(url, run, 2) < 2 and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


@at_once
async def test_a_zombies_outcome_is_fenced(database_url: str, tmp_path: Path) -> None:
    assert await stopped_for_longer_than_its_lease(database_url, tmp_path, settle_s=5) == 1


@at_once
async def test_twin_without_the_claim_epoch_it_is_taken_twice(
    database_url: str, tmp_path: Path
) -> None:
    await switched_off(database_url, FENCE)
    assert await stopped_for_longer_than_its_lease(database_url, tmp_path, settle_s=60) == 2


async def performed_after_the_watermark_passed(url: str, tmp_path: Path) -> int:
    """A worker stops between reading a message and committing what it decides; an heir decides on it and
    performs what follows; the watermark passes and the inbox is cleared; the worker goes on. How often
    was the effect performed? No stream moves in all this."""
    run, go = uuid4().hex, tmp_path / "go"
    go.touch()
    await warn(url, run)
    zombie = started(
        url, tmp_path, go, "stateless.intake.tx_before_commit:1:stop", effects_only=True
    )
    heir = None
    try:
        await reached(lambda: _stopped(zombie), why="the first worker is stopped")
        heir = started(url, tmp_path, go, effects_only=True)
        await reached(lambda: _performed(tmp_path, run), why="the heir performed the effect")
        await warn(url, later := uuid4().hex)
        await reached(lambda: _performed(tmp_path, later), why="the heir went on")
        heir.kill()
        heir.wait(60)
        await _watermark_passes(url)
        zombie.send_signal(signal.SIGCONT)
        await warn(url, last := uuid4().hex)
        await reached(lambda: _performed(tmp_path, last), why="the first worker went on")
    finally:
        for process in (zombie, heir):
            if process is not None:
                process.kill()
                process.wait(60)
    return (tmp_path / "performed").read_text().split().count(run)


async def _stopped(process: "subprocess.Popen[bytes]") -> bool:
    return not await _woken(process)


async def _performed(home: Path, run: str) -> bool:
    lines = home / "performed"
    return lines.exists() and run in lines.read_text().split()


async def _watermark_passes(url: str) -> None:
    """As the reconciler moves it, once the heir's inbox rows lie below it; and leases last."""
    async with connect(url, size=1) as database, Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        await log.append([CheckpointFailed(run="else", step=1, message="x")], cause=uuid4())
        await log.advance([ConsumerName("stateless")], await log.visible_head())
        assert await database.durable.fetchval("select count(*) from inbox") == 0
        await database.durable.execute(
            "update workers set expires_at = clock_timestamp() + interval '1 hour'"
        )


@at_once
async def test_messages_below_the_watermark_are_not_decided_on_again(
    database_url: str, tmp_path: Path
) -> None:
    assert await performed_after_the_watermark_passed(database_url, tmp_path) == 1


@at_once
async def test_twin_without_the_watermark_in_the_commit_an_effect_comes_back(
    database_url: str, tmp_path: Path
) -> None:
    await switched_off(database_url, PASSED)
    assert await performed_after_the_watermark_passed(database_url, tmp_path) == 2


class Overwriting(LocalBlobs):
    """A store without create-only writes."""

    async def put_blob(
        self, key: str, data: bytes, *, create_only: bool = False, sha256: str | None = None
    ) -> str:
        return await super().put_blob(key, data, sha256=sha256)


async def manifests_of_two_that_differ(directory: Path, blobs: LocalBlobs) -> tuple[str, str]:
    """The manifest after one attempt, and after another attempt whose step had other bits (a zombie on
    another machine): what a reader sees must not change."""
    world = bench(directory)
    ports = replace(world.ports, blobs=blobs)
    put = ports.artifacts.put_artifact
    weights, state = await put(b"weights", run="r1"), await put(b"state", run="r1")
    whole = version(4).model_copy(update={"weights": weights, "state": state})
    files = {"adapter_config.json": await put(b"{}", run="r1")}
    seen = []
    for plan in ((12,), (20,)):
        spec = checkpoint_spec(4, state=whole).model_copy(update={"files": files, "plan": plan})
        await perform(SaveCheckpoint(spec=spec), ports)
        uri = await blobs.exists("runs/r1/ckpt/4/MANIFEST.json")
        assert uri is not None
        seen.append((await blobs.get_blob(uri)).decode())
    return seen[0], seen[1]


async def test_the_first_manifest_stays(tmp_path: Path) -> None:
    first, second = await manifests_of_two_that_differ(tmp_path, LocalBlobs(tmp_path))
    assert first == second


async def test_twin_without_create_only_writes_it_changes_under_its_readers(
    tmp_path: Path,
) -> None:
    first, second = await manifests_of_two_that_differ(tmp_path, Overwriting(tmp_path))
    assert first != second
