"""A learner that was thought dead changes nothing: stopped (SIGSTOP) at each of its points, its lease
over for three times its length, its work taken up by an heir, and continued.

One asynchronous run. Each learner is the heir of the one before and stops at a point of its own; once
the run rests, all of them are continued at the same time. Nobody but a zombie could append anything
then. The manifests are put aside meanwhile, so that what a zombie puts can be held against the heir's.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from infra.failpoints import CONSUMERS, NAMED, runtime_points
from infra.operations.local.home import ChildState, read_state
from infra.spine.postgres.lease import LEASE_LOST, LEASE_S
from tests.chaos.trials import verified
from tests.crash.zombie import forkserver, learn
from tests.kit.platform import Platform, eventually, make_workspace, platform, run_config
from tests.kit.postgres import fresh_database

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

LEARN = runtime_points("learn", CONSUMERS["learn"])
AT_START = tuple(point for point in LEARN if "InitializePolicy" in point)
CHECKPOINT = (
    *runtime_points("checkpoint", CONSUMERS["checkpoint"]),
    *(point for point in NAMED if point.startswith(("ckpt.", "lease."))),
)
BATCHES: Sequence[Sequence[str]] = (
    (*AT_START, *(point for point in LEARN if "intake" in point)),
    tuple(point for point in LEARN if "TrainStep" in point) + CHECKPOINT[:5],
    CHECKPOINT[5:],
)
"""All points that a learner passes, in an order in which a run passes them; so many are stopped at
once."""


class Learners:
    """Learners of a platform whose own one is stopped, one after the other."""

    def __init__(self, running: Platform, database: str) -> None:
        self._running = running
        self._database = database
        self._context = forkserver()
        self._count = 0
        self.alive: list[BaseProcess] = []

    def start(self, failpoint: str = "") -> tuple[BaseProcess, str]:
        """A learner and its worker id."""
        self._count += 1
        worker = f"learner-{self._count}"
        arguments = (self._running.home, self._database, worker, failpoint)
        process = self._context.Process(target=learn, args=arguments)
        process.start()
        self.alive.append(process)
        return process, worker

    def stopped_at(self, point: str) -> tuple[BaseProcess, str]:
        """A learner that stands still at this point, and its worker id; its lease is long over."""
        process, worker = self.start(f"{point}:1:stop")
        eventually(lambda: _stands(process), within_s=60, what=f"a learner stops at {point}")
        self.sql(
            "update workers set expires_at = clock_timestamp() - make_interval(secs => $2)"
            " where id = $1",
            worker,
            3 * LEASE_S,
        )
        return process, worker

    def over(self, process: BaseProcess, worker: str) -> bool | None:
        """Whether a learner that was continued has ended; or it has a lease again, as one has that
        was stopped while it asked for it, and for which the database was away."""
        live = self.sql(
            "select from workers where id = $1 and expires_at > clock_timestamp()", worker
        )
        return True if live or not process.is_alive() else None

    def sql(self, statement: str, *arguments: object) -> list[Any]:
        async def execute() -> list[Any]:
            connection = await asyncpg.connect(self._database)
            try:
                return list(await connection.fetch(statement, *arguments))
            finally:
                await connection.close()

        return asyncio.run(execute())

    def told(self, run: str) -> list[tuple[str, int]]:
        """Every event that a learner may append, in the order of the log."""
        rows = self.sql(
            "select stream, version from events where stream in ($1, $2) order by position",
            f"policy-{run}",
            f"checkpoint-{run}",
        )
        return [(row["stream"], row["version"]) for row in rows]

    def close(self) -> None:
        for process in self.alive:
            if process.is_alive():
                process.kill()
            process.join(10)


def _stands(process: BaseProcess) -> bool | None:
    assert process.is_alive(), f"it ended with {process.exitcode} before its point"
    state = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return True if state == "T" else None


@contextmanager
def learners(root: Path, database: str) -> Iterator[tuple[Platform, Learners]]:
    """A platform whose own learner is stopped, and who learns instead of it."""
    workspace = make_workspace(root / "workspace")
    environment = {"HEADRACE_DATABASE_URL": database, "HEADRACE_WORKERS": "two"}
    with platform(root / "home", environment=environment) as running:
        running.post("/workspaces", {"url": str(workspace), "name": "w"})
        running.upload("numbers")
        own = eventually(lambda: _learner(running), within_s=60, what="its learner is started")
        assert own.pid is not None
        found = Learners(running, database)
        os.kill(own.pid, signal.SIGSTOP)
        try:
            found.sql("update workers set expires_at = clock_timestamp() where id = $1", own.worker)
            yield running, found
        finally:
            found.close()
            os.kill(own.pid, signal.SIGCONT)


def _learner(running: Platform) -> ChildState | None:
    state = read_state(running.home)
    assert state is not None
    (own,) = (child for child in state.children if child.name == "learner")
    return own if own.pid is not None else None


def settled(running: Platform, run: str, more: int) -> None:
    """Until so many more steps are taken."""
    wanted = (running.info(run)["run"]["current_step"] or 0) + more

    def reached() -> bool | None:
        return True if (running.info(run)["run"]["current_step"] or 0) >= wanted else None

    eventually(reached, within_s=60, what=f"step {wanted}")


RESTS = """
select (select count(*) from effects where run_id = $1 and worker is not null) = 0
   and (select count(*) from events where run_id = $1 and type = 'rl.checkpoint.requested')
     = (select count(*) from events where run_id = $1 and type = 'rl.checkpoint.saved')
     + (select count(*) from effects where run_id = $1 and type = 'SaveCheckpoint') as rests
"""


def resting(running: Platform, world: Learners, run: str) -> None:
    """Until the run is paused, its checkpoints are known to their consumer, and nobody holds any of
    its effects."""
    assert running.post(f"/runs/{run}/pause", {}).status_code == 200

    def rests() -> bool | None:
        paused = running.info(run)["run"]["phase"] == "paused"
        return True if paused and world.sql(RESTS, run)[0]["rests"] else None

    eventually(rests, within_s=60, what="the run rests")


def continued(
    world: Learners, zombies: Sequence[tuple[BaseProcess, str]], manifests: Mapping[Path, bytes]
) -> list[Path]:
    """Continue all of them; each ends by itself or is stopped. Returns the manifests that they put
    again."""
    aside = {path: path.with_suffix(".aside") for path in manifests}
    for path, other in aside.items():
        path.rename(other)
    for zombie, _ in zombies:
        assert zombie.pid is not None
        os.kill(zombie.pid, signal.SIGCONT)
    for zombie, worker in zombies:
        eventually(
            partial(world.over, zombie, worker), within_s=60, what=f"{worker} learns of its lease"
        )
        zombie.terminate()
        zombie.join(60)
        assert zombie.exitcode in (LEASE_LOST, 0, -signal.SIGTERM), worker
    put = [path for path in manifests if path.exists()]
    for path in put:
        assert path.read_bytes() == manifests[path], "byte for byte the owner's"
    for path, other in aside.items():
        other.replace(path)
    return put


def test_a_zombie_appends_nothing_and_puts_what_its_heir_put(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = run_config(
        checkpoints={"checkpoint_save_freq": 1},
        advanced={
            "max_steps": 1000,
            "execution_mode": "fully_async",
            "max_steps_off_policy": 2,
        },
    )
    with fresh_database(postgres_url) as database, learners(tmp_path, database) as (running, world):
        run = running.submit(config, workspace="w")
        put: list[Path] = []
        for batch in BATCHES:
            zombies = [world.stopped_at(point) for point in batch]
            heir, _ = world.start()
            settled(running, run, 2)
            resting(running, world, run)
            before = world.told(run)
            found = running.home.rglob(f"runs/{run}/ckpt/*/MANIFEST.json")
            manifests = {path: path.read_bytes() for path in found}
            put += continued(world, zombies, manifests)
            assert world.told(run) == before, "nothing was appended"
            heir.terminate()
            heir.join(60)
            assert running.post(f"/runs/{run}/resume", {}).status_code == 200
        assert put, "some were stopped before they put a manifest"
        world.start()
        settled(running, run, 1)
        assert running.post(f"/runs/{run}/stop", {}).status_code == 200
        running.wait(run, "stopped")
        steps = Counter(
            event["data"]["step"]
            for event in running.events(run)
            if event["type"] == "rl.policy.updated"
        )
        assert set(steps.values()) == {1}, "no step was taken twice"
        verified(running, run)
