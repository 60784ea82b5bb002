"""How fast the recorded samples of a run are graded again, and with how much memory.

`PYTHONPATH=. python bench/regrades.py [--samples 100000]` makes a run of one real step on a platform of
its own, copies its group with other texts until the log has so many samples, and regrades them: with
other weights of the recorded parts, and with a grader that compares a text with the label. The time is
that of the whole command, from the request to the report, and the CPU seconds are those of all processes
of the platform, Postgres included. The memory is the most that the worker and
the processes of user code held, in MiB, beside what the worker held before. Ends with 1 when a goal is
missed.
"""

import argparse
import asyncio
import hashlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import psutil

from infra.spine.postgres.codec import encode
from schemas.artifact_refs import ArtifactRef
from schemas.events import GroupGraded
from schemas.sampling import Grade, Message, SampleBatch, SampleRecord, Sequence
from schemas.specs import SampleEntry
from tests.kit.platform import Platform, eventually, make_workspace, platform, run_config
from tests.kit.postgres import fresh_database
from tests.stack.postgres import postgres_server

GROUP, TOKENS, PER_STEP = 8, 64, 32
LEAST_PER_S, MOST_GROWTH_MIB = 5000, 150
COLUMNS = (
    *("id", "stream", "version", "type", "schema_version", "data"),
    *("run_id", "correlation"),
)
MAIN = """
from headrace import AgentWorkflow, Grader


class Say(AgentWorkflow):
    async def run(self, ctx):
        reply = await ctx.chat(ctx.prompt)
        return [*ctx.prompt, reply]


class Compare(Grader):
    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            ctx.set_sample_reward(name, float(sample.text.strip() == ctx.label))
"""


def group_of(first: GroupGraded, number: int) -> tuple[GroupGraded, bytes]:
    """The copy `number` of a group, and its samples. Their texts are numbers from 0 to 9."""
    group = f"{first.spec.owner}-train-{1 + number // PER_STEP}-{number % PER_STEP}-1"
    samples = []
    for index in range(GROUP):
        text = str((number * 31 + index * 7) % 10)
        ids = tuple((number + index * 13 + n) % 90 for n in range(TOKENS))
        row = Sequence(
            tokens=ids,
            loss_mask=(0,) * 8 + (1,) * (TOKENS - 8),
            logprobs=(-1.0 - index / 7,) * TOKENS,
        )
        messages = (Message(role="user", content="Say"), Message(role="assistant", content=text))
        samples.append(SampleRecord(index=index, text=text, messages=messages, sequences=(row,)))
    data = SampleBatch(group=group, samples=tuple(samples)).model_dump_json().encode()
    sha256 = hashlib.sha256(data).hexdigest()
    graded = first.model_copy(
        update={
            "spec": first.spec.model_copy(update={"group": group}),
            "artifact": ArtifactRef(uri=f"row:{sha256}", sha256=sha256, size=len(data)),
            "entries": tuple(SampleEntry(index=i, completion_tokens=56) for i in range(GROUP)),
            "grades": tuple(Grade(index=i, reward=((number + i) % 5) / 4) for i in range(GROUP)),
        }
    )
    return graded, data


async def fill(url: str, run: str, samples: int) -> None:
    """Copy the first recorded group of a run until it has so many samples."""
    connection = await asyncpg.connect(url)
    found = await connection.fetchval(
        "select data::text from events where run_id = $1 and type = $2 limit 1",
        run,
        GroupGraded.type,
    )
    first = GroupGraded.model_validate_json(found)
    await connection.execute("set session_replication_role = replica")
    for start in range(0, samples // GROUP, 500):
        numbers = range(start, min(start + 500, samples // GROUP))
        made = [group_of(first, number) for number in numbers]
        rows = [
            (uuid4(), e.stream, 1, e.type, e.version, encode(e), e.run_id, UUID(int=1))
            for e, _ in made
        ]
        async with connection.transaction():
            await connection.copy_records_to_table("events", records=rows, columns=COLUMNS)
            await connection.executemany(
                "insert into streams values ($1, 1)", [(e.stream,) for e, _ in made]
            )
            await connection.executemany(
                "insert into artifacts values ($1, $2) on conflict do nothing",
                [(e.artifact.sha256, data) for e, data in made],
            )
    await connection.execute("analyze")
    await connection.close()


@contextmanager
def watched_memory(process: psutil.Process) -> Iterator[list[int]]:
    """The memory of a process and all that it started, in bytes, ten times a second."""
    seen: list[int] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.1):
            seen.append(memory_of(process))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def memory_of(process: psutil.Process) -> int:
    """The proportional memory of Python processes below `process`, in bytes."""
    total = 0
    for child in (process, *process.children(recursive=True)):
        try:
            if "postgres" not in child.name():
                total += child.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def cpu_of(process: psutil.Process) -> dict[int, float]:
    """The CPU seconds of a process and all that it started, by process."""
    seconds = {}
    for child in (process, *process.children(recursive=True)):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        seconds[child.pid] = times.user + times.system
    return seconds


def regrade(started: Platform, run: str, body: dict[str, Any]) -> tuple[Any, float, float, float]:
    """The regrade, its seconds, its CPU seconds, and the MiB by which memory grew."""
    process = psutil.Process(started.process.pid)
    before, cpu = memory_of(process), cpu_of(process)
    start = time.perf_counter()
    with watched_memory(process) as seen:
        asked = started.post(f"/runs/{run}/regrades", body)
        assert asked.status_code == 202, asked.text
        identity = asked.json()["regrade"]["id"]

        def look() -> Any:
            found = started.get(f"/regrades/{identity}")["regrade"]
            return found if found["status"] in ("finished", "failed") else None

        found = eventually(look, within_s=600, what="the regrade ends", every_s=0.5)
    seconds = time.perf_counter() - start
    used = sum(spent - cpu.get(pid, 0.0) for pid, spent in cpu_of(process).items())
    return found, seconds, used, (max(seen) - before) / 2**20


def measure(home: Path, url: str, samples: int) -> bool:
    """Print a line for each way to regrade. Returns whether all goals are met."""
    workspace = make_workspace(home / "workspace", {"rollouts/say/main.py": MAIN})
    settings = {"HEADRACE_DATABASE_URL": url}
    is_met = True
    with platform(home / "home", environment=settings) as started:
        made = started.post("/workspaces", {"url": str(workspace), "name": "w"})
        assert made.status_code == 201, made.text
        started.upload("numbers")
        config = run_config(advanced={"max_steps": 1}, training={"n_samples_per_prompt": GROUP})
        run = started.submit(config, workspace="w")
        started.wait(run, "finished")
        asyncio.run(fill(url, run, samples))
        print(
            f"{'':12}{'samples':>9}{'seconds':>9}{'samples/s':>11}{'CPU s':>8}{'MiB more':>10}",
            flush=True,
        )
        for name, body in (
            ("weights", {"weights": {"grader": 0.5}}),
            ("comparison", {"grader": "main"}),
            ("comparison", {"grader": "main"}),
        ):
            found, seconds, used, growth = regrade(started, run, body)
            assert found["status"] == "finished", found["error"]
            count = found["report"]["samples"]
            print(
                f"{name:12}{count:>9,}{seconds:>9.2f}{count / seconds:>11,.0f}{used:>8.2f}"
                f"{growth:>10.0f}",
                flush=True,
            )
            is_met &= count / seconds >= LEAST_PER_S and growth <= MOST_GROWTH_MIB
    return is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, postgres_server() as server:
        Path(directory).chmod(0o755)
        with fresh_database(server.url) as url:
            return 0 if measure(Path(directory), url, asked.samples) else 1


if __name__ == "__main__":
    sys.exit(main())
