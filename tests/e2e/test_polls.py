"""Without any webhook a push still trains: a poll finds it, also when the server was away meanwhile."""

import asyncio
from pathlib import Path

import asyncpg
import pytest

from infra.operations.local import embedded_postgres
from schemas.events import RefsMoved
from tests.kit.platform import Platform, eventually, git, make_workspace, platform
from tests.kit.prometheus import samples
from tests.kit.pushed_workspace import toml_of

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.postgres, pytest.mark.torch]

TRIGGER = (
    '[[trigger]]\nbranches = ["main"]\nconfig = "configs/short.toml"\nname = "polled-{number}"\n'
)
SHORT = {"training": {"rollout_batch_size": 1}, "advanced": {"max_steps": 1}}
POLLING = {"HEADRACE_POLL_S": "1"}


def push(copy: Path) -> None:
    git(copy, "commit", "-q", "--allow-empty", "-m", "a change")
    git(copy, "push", "-q", "origin", "main")


def runs(running: Platform) -> list[str]:
    return sorted(run["name"] for run in running.get("/runs", limit=50)["runs"])


def moves(home: Path) -> int:
    """How often refs moved."""
    return asyncio.run(_moves(home))


async def _moves(home: Path) -> int:
    connection = await asyncpg.connect(embedded_postgres.place_for(home).url)
    try:
        kind = RefsMoved.type
        return int(await connection.fetchval("select count(*) from events where type = $1", kind))
    finally:
        await connection.close()


def more(home: Path, *, than: int) -> int | None:
    found = moves(home)
    return found if found > than else None


def finished(running: Platform, *names: str) -> None:
    eventually(lambda: runs(running) == list(names) or None, within_s=60, what=f"runs {names}")
    for name in names:
        running.wait(name, "finished")


def test_a_push_that_nobody_told_of_trains(tmp_path: Path) -> None:
    files = {"headrace.toml": TRIGGER, "configs/short.toml": toml_of(**SHORT)}
    copy, bare = make_workspace(tmp_path / "copy", files), tmp_path / "math.git"
    git(tmp_path, "clone", "-q", "--bare", str(copy), str(bare))
    git(copy, "remote", "add", "origin", str(bare))
    with platform(tmp_path / "home", environment=POLLING) as running:
        running.upload("numbers")
        request = {"url": str(bare), "name": "math", "forge": "none"}
        answer = running.post("/workspaces/connect", request)
        assert answer.status_code in (200, 201), answer.text
        workspace = answer.json()["workspace"]["id"]
        push(copy)
        finished(running, "polled-2")
        metrics = samples(running.api.get(f"{running.url}/metrics").text)
        assert metrics["headrace_poll_age_seconds"][(workspace,)] < 60
    push(copy)  # while the server is away
    with platform(tmp_path / "home", environment=POLLING) as running:
        finished(running, "polled-2", "polled-3")
        moved = moves(tmp_path / "home")
        bare.rename(tmp_path / "away.git")
        git(tmp_path, "init", "-q", "--bare", "math.git")  # the repository comes back empty
        emptied = eventually(lambda: more(tmp_path / "home", than=moved), within_s=60, what="empty")
        (tmp_path / "math.git").rename(tmp_path / "empty.git")
        (tmp_path / "away.git").rename(bare)
        eventually(lambda: more(tmp_path / "home", than=emptied), within_s=60, what="whole")
        push(copy)
        finished(running, "polled-2", "polled-3", "polled-6")
