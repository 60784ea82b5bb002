"""The pages of the dashboard with 10,000 runs, 1,000,000 events and a run of 10,000 steps.

`python -m bench.dashboard` fills a database through the log and its projection, copies rows in SQL until
there are as many, and serves it from a process of its own. It prints how long the first answer of each
page takes, how many bytes the page has with all files that it names, how soon a live curve shows an
event, and what viewers of a run cost. Ends with 1 when a goal is missed.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import httpx
import psutil

from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from infra.identity.api_key_format import digest
from infra.identity.sessions import Bearer
from infra.ports.actor import ROOT
from infra.readmodel.run_pages import ORDERS
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import connect
from schemas.events import (
    BatchAssembled,
    Event,
    GroupGenerated,
    GroupGraded,
    GroupsRequested,
    RunWarned,
)
from schemas.ids import GroupKey, Purpose
from schemas.sampling import Grade
from schemas.specs import BatchGroup, GroupSpec, SampleEntry, Slot
from tests.kit.application import API_KEY, application
from tests.kit.postgres import execute, fresh_database
from tests.kit.showcase import FIRST, SECOND, fill, step_events
from tests.kit.specs import ref
from tests.kit.specs import template as group_template
from tests.stack.postgres import postgres_server

RUNS, EVENTS, STEPS, VIEWERS = 10_000, 1_000_000, 10_000, 200
MOST_P95_S, MOST_BYTES, MOST_DELAY_S, MOST_CORE = 0.1, 150_000, 1.0, 0.1
WAITED_AFTER = 200
GROUPS = 4
"""Groups in each step of the long run."""

WATCHED_S = 10.0
ASSET = re.compile(r'(?:src|href)="(/static/[^"]+)"')

COPIES = (
    """insert into runs select * from (select (jsonb_populate_record(r, jsonb_build_object(
    'run', 'copy-' || n, 'name', 'copied-run-' || n, 'reward', (n % 100) / 100.0,
    'created_at', r.created_at - n * interval '1 minute'))).*
    from runs r, generate_series(1, {runs}) n where r.run = '{run}') as c""",
    """insert into metric_points select 'copy-' || n, p.key, p.step, p.value, p.at
    from metric_points p, generate_series(1, {runs}) n
    where p.run = '{run}' and p.key = 'rollout/raw_reward'""",
    """insert into events
    (id, stream, version, type, schema_version, data, run_id, causation, correlation)
    select gen_random_uuid(), 'run-copy-' || n, e.version, e.type, e.schema_version, e.data,
    'copy-' || n, gen_random_uuid(), e.correlation
    from (select *, row_number() over (order by position) as place
    from events where run_id = '{run}') e, generate_series(1, {runs}) n
    where e.place <= {events} / {runs}""",
    """update watermarks set position = (select max(position) from events),
    xid = (select max(xid::text::bigint) from events)::text::xid8""",
    "update runs set total_steps = {steps} * 2 where run = '{long}'",
    "analyze",
)
"""Copies of a run, of its points and of its events. The projection's watermark is moved past them."""


@dataclass(frozen=True)
class Served:
    """A server in a process of its own, and a client that is signed in."""

    process: psutil.Process
    client: httpx.AsyncClient

    @property
    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


async def make_history(url: str, home: Path, *, steps: int) -> dict[str, str]:
    """Append the showcase and the steps of a long run. Returns the addresses of the pages."""
    async with application(url, home) as app:
        showcase = await fill(app)
        for step in range(41, steps + 1):
            events = [*group_events(SECOND, step, GROUPS), *step_events(SECOND, step)]
            await app.services.log.append(events, cause=uuid4())
            if step % WAITED_AFTER == 0:
                await app.append([RunWarned(run=SECOND, step=step, message="slow")])  # projected
        await app.append(step_events(SECOND, steps + 1))
        return showcase.pages


def group_events(run: str, step: int, groups: int) -> Iterator[Event]:
    """The events of the groups of a step, until they are its batch."""
    template = group_template(num_samples=2).model_copy(update={"run": run})
    slots = tuple(Slot(slot=slot, row=slot) for slot in range(groups))
    yield GroupsRequested(
        owner=run, purpose=Purpose.TRAIN, step=step, slots=slots, template=template
    )
    artifact, held = ref("samples"), []
    for slot in slots:
        key = GroupKey(run, Purpose.TRAIN, step, slot.slot)
        spec = GroupSpec(group=str(key), row=slot.row, template=template)
        entries = tuple(
            SampleEntry(index=n, prompt_tokens=50, completion_tokens=90) for n in (0, 1)
        )
        yield GroupGenerated(spec=spec, entries=entries, parts=(artifact,))
        grades = (Grade(index=0, reward=1.0), Grade(index=1, reward=0.0))
        yield GroupGraded(spec=spec, artifact=artifact, entries=entries, grades=grades)
        held.append(
            BatchGroup(slot=slot.slot, replacement=0, artifact=artifact, rewards=(1.0, 0.0))
        )
    yield BatchAssembled(run=run, step=step, groups=tuple(held))


async def serve(url: str, home: Path) -> None:
    """Serve until standard input ends. Prints the port and a code that signs in."""
    async with application(url, home) as app:
        server = HttpServer(app.app, host="127.0.0.1", port=0, limits=ConnectionLimits())
        await server.listen()
        serving = asyncio.ensure_future(server.serve())
        code = await app.services.sessions.issue_code(Bearer(ROOT, digest(API_KEY)))
        print(json.dumps({"port": server.port, "code": code}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        server.stop()
        await serving


@asynccontextmanager
async def served(url: str, home: Path) -> AsyncIterator[Served]:
    """Start a server, and sign in."""
    command = [sys.executable, "-m", "bench.dashboard", "--serve", url, "--home", str(home)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    if process.stdin is None or process.stdout is None:
        raise SystemExit("the server has no pipes")
    said = json.loads(await process.stdout.readline())
    limits = httpx.Limits(max_connections=None)
    base = f"http://127.0.0.1:{said['port']}"
    async with httpx.AsyncClient(base_url=base, timeout=60, limits=limits) as client:
        answer = await client.post("/login", data={"code": said["code"]}, headers={"Origin": base})
        client.cookies.update(answer.cookies)
        yield Served(psutil.Process(process.pid), client)
    process.stdin.close()
    await process.wait()


async def measure_pages(server: Served, pages: dict[str, str], *, requests: int) -> bool:
    """Print the times and bytes of each page. Returns whether the goals are met."""
    is_kept, sizes = True, dict[str, int]()
    print(f"{'page':<16} {'p50 ms':>8} {'p95 ms':>8} {'bytes':>8}", flush=True)
    for name, path in pages.items():
        times, text = [], ""
        for _ in range(requests):
            began = time.perf_counter()
            answer = await server.client.get(path)
            times.append(time.perf_counter() - began)
            text = answer.text
        for asset in {*ASSET.findall(text)} - sizes.keys():
            sizes[asset] = len((await server.client.get(asset)).content)
        size = len(text.encode()) + sum(sizes[asset] for asset in {*ASSET.findall(text)})
        p95 = statistics.quantiles(times, n=20)[18]
        kept = p95 <= MOST_P95_S and size <= MOST_BYTES
        is_kept = is_kept and kept
        row = f"{name:<16} {statistics.median(times) * 1e3:>8.1f} {p95 * 1e3:>8.1f} {size:>8}"
        print(row + ("" if kept else "  MISSED"), flush=True)
    return is_kept


async def _watch(server: Served, shown: list[tuple[int, float]]) -> None:
    """View the long run, and note when each of its steps is shown."""
    async with server.client.stream("GET", f"/runs/{SECOND}/live", timeout=None) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                shown.append((int(json.loads(line[6:])["step"]), time.perf_counter()))


async def newest_event(server: Served) -> str:
    """The cursor of the newest event of the long run."""
    page = (await server.client.get(f"/runs/{SECOND}/events.json?before=end&limit=1")).json()
    return str(page["events"][-1]["cursor"])


async def late_cursors(server: Served) -> dict[str, str]:
    """By the order of a list of runs: the cursor that its last full page begins after."""
    found = {}
    for order in ORDERS:
        cursors, asked = [""], {"sort": order}
        while after := (await server.client.get("/runs.json", params=asked)).json()["next_cursor"]:
            cursors.append(after)
            asked["after"] = after
        found[order] = cursors[max(0, len(cursors) - 2)]
    return found


async def measure_viewers(server: Served, url: str, *, first: int, viewers: int) -> bool:
    """Let a run take a step each second while so many view it. Returns whether the goals are met."""
    shown: list[list[tuple[int, float]]] = [[] for _ in range(viewers)]
    watching = [asyncio.ensure_future(_watch(server, mine)) for mine in shown]
    await asyncio.sleep(3)
    appended: dict[int, float] = {}
    before, began = server.cpu_s, time.perf_counter()
    async with connect(url) as database, Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        while time.perf_counter() - began < WATCHED_S:
            step = first + len(appended)
            appended[step] = time.perf_counter()
            await log.append([*step_events(SECOND, step)], cause=uuid4())
            await asyncio.sleep(1)
    share = (server.cpu_s - before) / (time.perf_counter() - began)
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    delays = [
        min((at for step, at in mine if step >= wanted), default=float("inf")) - at_first
        for mine in shown
        for wanted, at_first in appended.items()
    ]
    worst = max(delays, default=0.0)
    print(
        f"{viewers:>3} viewers: {share:.1%} of a core, a step is shown after at most {worst:.2f} s"
    )
    return worst <= MOST_DELAY_S and share <= MOST_CORE


async def measure(url: str, home: Path, options: argparse.Namespace) -> bool:
    """Fill the database, and measure everything. Returns whether all goals are met."""
    began = time.perf_counter()
    pages = await make_history(url, home, steps=options.steps)
    numbers = {"runs": options.runs, "events": options.events, "steps": options.steps}
    for statement in COPIES:
        await execute(url, statement.format(run=FIRST, long=SECOND, **numbers))
    print(f"filled in {time.perf_counter() - began:.0f} s", flush=True)
    async with served(url, home) as server:
        newest = await newest_event(server)
        late = await late_cursors(server)
    pages |= {
        "run-long": f"/runs/{SECOND}",
        "curves-long": f"/runs/{SECOND}/curves.json?keys=rollout/raw_reward,train/kl",
        "events-long": f"/runs/{SECOND}/events",
        "events-newest": f"/runs/{SECOND}/events?before=end",
        "events-settled": f"/runs/{SECOND}/events?types=rl.step.settled&before=end",
        "events-searched": f"/runs/{SECOND}/events?search=no such text",
        "at-long": f"/runs/{SECOND}/at/{newest}",
        "timeline-long": f"/runs/{SECOND}/timeline",
        "timeline-middle": f"/runs/{SECOND}/timeline?step={options.steps // 2}",
        "runs-searched": "/?search=run-99",
        "runs-best": "/?sort=reward",
        **{f"runs-late-{order}": f"/?sort={order}&after={late[order]}" for order in late},
    }
    async with served(url, home) as server:
        is_kept = await measure_pages(server, pages, requests=options.requests)
        next_step = options.steps + 2
        for viewers in (0, 1, options.viewers):
            met = await measure_viewers(server, url, first=next_step, viewers=viewers)
            is_kept, next_step = is_kept and met, next_step + 100
    return is_kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or serve for a process that measures. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--requests", type=int, default=20, help="for each page")
    parser.add_argument("--viewers", type=int, default=VIEWERS)
    parser.add_argument("--serve", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        asyncio.run(serve(options.serve, options.home))
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="headrace-bench-") as root,
        postgres_server() as server,
        fresh_database(server.url) as url,
    ):
        return 0 if asyncio.run(measure(url, Path(root) / "home", options)) else 1


if __name__ == "__main__":
    sys.exit(main())
