"""Forks: how long a fork of a run of up to 1,000,000 events takes to be answered and to start its first
sample, and how long the difference of two such runs takes.

A platform trains a short run. Then its log is padded with steps as a long run has them (each with the
version of the last checkpoint), its snapshots are saved as its life would have saved them, and the
platform starts again. `fork` is from the request to the answer of `headrace train fork`'s route, `first
sample` from the request until a worker begins the first sample. For `diff` the child gets the second
half of its parent's log.

    python -m bench.forks --events 1000000
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg

from consumers.run.consumer import CONSUMER
from infra.operations.local import embedded_postgres
from infra.spine.postgres.codec import encode
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import connect
from infra.spine.runtime.folded_states import StateCache
from schemas.envelope import decode_event
from schemas.events import Event, PolicyUpdated, StepSettled
from schemas.ids import StreamName, policy_stream, run_stream
from tests.kit.platform import Platform, make_workspace, platform, run_config

GROUPS = 8
COLUMNS = ("id", "stream", "version", "type", "schema_version", "data", "run_id", "correlation")
SETTLED = (
    '{"owner":"%s","purpose":"train","step":%d,"groups":[{"group":{"slot":%d,"replacement":0,'
    '"artifact":{"uri":"none:","sha256":"%s","size":0},"rewards":[0.0,1.0]}}]}'
)
OF_STEP = 2 + 3 * GROUPS
METRICS = ("rollout/raw_reward", "train/loss", "train/kl", "train/grad_norm", "train/entropy_loss")
FORKS = 5
SELDOM_SAVED = run_config(checkpoints={"checkpoint_save_freq": 1_000_000})
"""The padding has no checkpoints, which a run would wait for."""


def padding(
    run: str, made: PolicyUpdated, settled: StepSettled, first: int, steps: int
) -> Iterator[tuple[StreamName, str, str]]:
    """The events of these steps as (stream, type, data)."""
    own, policy = run_stream(run), policy_stream(run)
    for step in range(first, first + steps):
        for slot in range(GROUPS):
            key = f"{run}-train-{step}-{slot}-0"
            yield StreamName(f"group-{key}"), "rl.group.generated", "{}"
            yield StreamName(f"grade-{key}"), "rl.group.graded", "{}"
            yield own, "rl.groups.settled", SETTLED % (run, step, slot, "0" * 64)
        state = made.state.model_copy(update={"step": step})
        update = {"step": step, "state": state, "pinned": True}
        yield policy, PolicyUpdated.type, encode(made.model_copy(update=update))
        yield (
            own,
            StepSettled.type,
            encode(settled.model_copy(update={"step": step, "state": state})),
        )


async def newest(connection: asyncpg.Connection, stream: StreamName, kind: type[Event]) -> Event:
    row = await connection.fetchrow(
        "select type, schema_version, data from events where stream = $1 and type = $2"
        " order by version desc limit 1",
        stream,
        kind.type,
    )
    return decode_event(row["type"], row["schema_version"], row["data"])


async def pad(url: str, run: str, events: int) -> int:
    """Pad the log of a run to so many events. Returns its last step."""
    connection = await asyncpg.connect(url)
    made = await newest(connection, policy_stream(run), PolicyUpdated)
    settled = await newest(connection, run_stream(run), StepSettled)
    assert isinstance(made, PolicyUpdated)
    assert isinstance(settled, StepSettled)
    versions = dict(await connection.fetch("select stream, version from streams"))
    steps, rows = events // OF_STEP, []
    for stream, kind, data in padding(run, made, settled, settled.step + 1, steps):
        versions[stream] = version = versions.get(stream, 0) + 1
        rows.append((uuid4(), stream, version, kind, 1, data, run, UUID(int=1)))
        if len(rows) == 20_000:
            await connection.copy_records_to_table("events", records=rows, columns=COLUMNS)
            rows = []
    await connection.copy_records_to_table("events", records=rows, columns=COLUMNS)
    for stream in (run_stream(run), policy_stream(run)):
        await connection.execute(
            "update streams set version = $2 where stream = $1", stream, versions[stream]
        )
    last, now = settled.step + steps, datetime.now(UTC)
    for key in METRICS:
        points = ((run, key, step, step / last, now) for step in range(settled.step + 1, last + 1))
        await connection.copy_records_to_table("metric_points", records=points)
    await connection.execute("update runs set current_step = $2 where run = $1", run, last)
    await pass_padding(connection)
    await connection.close()
    return last


async def pass_padding(connection: asyncpg.Connection) -> None:
    """Let consumers begin behind the padding, which they would have consumed as it came."""
    await connection.execute(
        "update watermarks set (xid, position) = (select xid, position from events"
        " order by xid desc, position desc limit 1)"
    )
    await connection.execute("vacuum analyze events")


async def fold(url: str, run: str) -> float:
    """Fold a run's stream as a process does that has no snapshot, which saves snapshots on its way."""
    async with connect(url) as database, Notifier(database) as notifier:
        began = time.perf_counter()
        await StateCache(PostgresLog(database, notifier)).load({run_stream(run): CONSUMER})
        return time.perf_counter() - began


async def lengthen(url: str, parent: str, child: str, step: int) -> None:
    """Give a fork the history that its parent has after the step of the fork."""
    connection = await asyncpg.connect(url)
    for stream in ("run-", "policy-"):
        await connection.execute(
            "insert into events (id, stream, version, type, schema_version, data, run_id, correlation)"
            " select gen_random_uuid(), $1 || $3, h.version + row_number() over (order by e.version),"
            " e.type, e.schema_version, replace(e.data::text, $2, $3)::json, $3, e.correlation"
            " from events e, (select max(version) as version from events where stream = $1 || $3) h"
            " where e.stream = $1 || $2 and e.type in ('rl.step.settled', 'rl.policy.updated')"
            " and (e.data ->> 'step')::integer > $4",
            stream,
            parent,
            child,
            step + 1,
        )
        await connection.execute(
            "update streams s set version = (select max(e.version) from events e"
            " where e.stream = s.stream) where s.stream = $1",
            stream + child,
        )
    await connection.execute(
        "insert into metric_points select $2, key, step, value, at from metric_points"
        " where run = $1 and step > $3 on conflict do nothing",
        parent,
        child,
        step,
    )
    await pass_padding(connection)
    await connection.close()


def fork(running: Platform, run: str, step: int, last: int) -> tuple[str, float, float]:
    """Fork a run. Returns the child, and the seconds until the answer and until its first sample."""
    began = time.time()
    answer = running.post(
        f"/runs/{run}/fork", {"at": str(step), "set": {"advanced.max_steps": last + 10}}
    )
    answered = time.time() - began
    assert answer.status_code == 201, answer.text
    child = answer.json()["run"]["id"]
    while True:
        page = running.get(f"/runs/{child}/events", limit=100)["events"]
        sampled = [e for e in page if e["type"] == "rl.sample.generated"]
        if sampled:
            ended = [datetime.fromisoformat(e["time"]).timestamp() for e in sampled]
            starts = [at - e["data"]["seconds"] for at, e in zip(ended, sampled, strict=True)]
            running.post(f"/runs/{child}/stop", {})
            return child, answered, min(starts) - began
        time.sleep(0.02)


def main(events: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        home, tree = Path(directory) / "home", Path(directory) / "workspace"
        print(f"forks of a run of {events:,} events, load {os.getloadavg()[0]:.1f}")
        with platform(home) as running:
            running.post("/workspaces", {"name": "w", "url": str(make_workspace(tree))})
            running.upload("numbers")
            run = running.submit(SELDOM_SAVED, workspace="w", name="long")
            running.wait(run, "finished")
        server = embedded_postgres.start(home)
        last = asyncio.run(pad(server.url, run, events))
        print(f"its stream folded without a snapshot: {asyncio.run(fold(server.url, run)):.1f} s")
        server.stop()
        with platform(home) as running:
            times = []
            for number in range(FORKS):
                step = last * (number + 1) // (FORKS + 1)
                child, *measured = fork(running, run, step, last)
                times.append(measured)
                print(
                    f"step {step:>7,}: fork {measured[0]:.2f} s, first sample {measured[1]:.2f} s"
                )
        answered, sampled = zip(*times, strict=True)
        print(
            f"median: fork {statistics.median(answered):.2f} s, first sample "
            f"{statistics.median(sampled):.2f} s; slowest {max(answered):.2f} s, {max(sampled):.2f} s"
        )
        server = embedded_postgres.start(home)
        asyncio.run(lengthen(server.url, run, child, step))
        server.stop()
        with platform(home) as running:
            for _ in range(3):
                began = time.perf_counter()
                running.get(f"/runs/{run}/diff/{child}")
                print(f"diff {time.perf_counter() - began:.2f} s")
        print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    main(parser.parse_args().events)
