"""The evidence of a run that does not end: enough to find out what each process waits for."""

import asyncio
import json
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
import httpx

from infra.operations.local.home import read_state
from tests.chaos.victims import Processes, pids, signalled
from tests.kit.platform import Platform

QUESTIONS = {
    "sessions": "select pid, datname, application_name, state, wait_event_type, wait_event, xact_start,"
    " backend_xid, left(query, 200) as query from pg_stat_activity"
    " where backend_type = 'client backend'",
    "effects": "select id, consumer, type, lane, worker, epoch, attempts, crashes, shut, due_at, error,"
    " run_id from effects order by created limit 200",
    "workers": "select *, expires_at > clock_timestamp() as lives from workers order by started_at",
    "gates": "select * from run_gates",
    "watermarks": "select * from watermarks",
    "last_events": "select xid, position, stream, version, type, time from events"
    " order by xid desc, position desc limit 60",
    "now": "select clock_timestamp(), pg_current_snapshot()",
}
SERVERS = ("postmaster", "auxiliary", "backend", "broker")
SAID_S = 2.0
"""Stacks are written within this time, or the process does not run at all."""


def keep(directory: Path, run: str, processes: Processes, database: str) -> str:
    """Write down everything into `directory`. Returns one line that sums it up."""
    directory.mkdir(parents=True, exist_ok=True)
    platforms = processes.platforms
    servers = [pid for target in SERVERS for pid in processes.of(target)]
    found: dict[str, Any] = {
        "status": _answer(platforms[0], "/status"),
        "run": _answer(platforms[0], f"/runs/{run}"),
        **_asked(database),
        "processes": [_process(pid) for platform in platforms for pid in _everyone(platform)],
        "servers": [_process(pid) for pid in servers],
    }
    (directory / "found.json").write_text(json.dumps(found, indent=1, default=str))
    _stacks(platforms)
    if log := processes.database_log():
        shutil.copy(log, directory / "postgres.log")
    for number, platform in enumerate(platforms):
        shutil.copytree(platform.home / "logs", directory / f"logs-{number}", dirs_exist_ok=True)
        said = platform.home.with_name(f"{platform.home.name}.up.log")
        shutil.copy(said, directory / f"up-{number}.log")
    return _summary(found)


def _summary(found: dict[str, Any]) -> str:
    run = found["run"].get("run", {})
    waits = [wait["message"] for wait in found["run"].get("waiting_for") or ()]
    effects = found.get("effects") or []
    waiting = [f"{e['type']} of {e['worker'] or 'nobody'}" for e in effects[:4]]
    if "database" in found:
        return f"the database does not answer: {found['database']}"
    return (
        f"{run.get('status')}/{run.get('phase')} at step {run.get('current_step')}, waits for "
        f"{waits or None}; {len(effects)} effects: {', '.join(waiting)}"
    )


def _answer(platform: Platform, path: str) -> Any:
    try:
        return platform.api.get(path).json()
    except (httpx.HTTPError, ValueError) as error:
        return {"error": repr(error)}


def _asked(database: str) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        connection = await asyncpg.connect(database, timeout=10)
        try:
            return {
                name: [dict(row) for row in await connection.fetch(question)]
                for name, question in QUESTIONS.items()
            }
        finally:
            await connection.close()

    try:
        return asyncio.run(ask())
    except (OSError, asyncpg.PostgresError, TimeoutError) as error:
        return {"database": repr(error)}


def _everyone(platform: Platform) -> list[int]:
    targets = ("supervisor", "forkserver", "control", "worker", "git", "discover", "user")
    return list(dict.fromkeys(pid for target in targets for pid in pids(platform, target)))


def _process(pid: int) -> dict[str, Any]:
    """The kernel's view of a process and of each of its threads."""
    root = Path(f"/proc/{pid}")
    try:
        threads = {
            task.name: f"{(task / 'comm').read_text().strip()}: {(task / 'wchan').read_text()}"
            for task in (root / "task").iterdir()
        }
        said = (root / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        state = (root / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError as error:
        return {"pid": pid, "gone": repr(error)}
    return {"pid": pid, "state": state, "command": said[-200:], "threads": threads}


def _stacks(platforms: Sequence[Platform]) -> None:
    """Let our own Python processes say what they wait for (`inside/sitecustomize.py`)."""
    for platform in platforms:
        state = read_state(platform.home)
        for child in state.children if state else ():
            if child.pid is not None:
                signalled([child.pid], signal.SIGUSR1)
    time.sleep(SAID_S)
