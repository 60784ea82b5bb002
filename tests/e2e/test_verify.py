"""A run is what its log says: every version built again from the log, every byte compared; and one
flipped byte, wherever it is, is named."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg
import pytest

from tests.kit.platform import (
    Platform,
    final_adapter,
    git,
    make_workspace,
    platform,
    run_config,
    verify,
)
from tests.kit.postgres import fresh_database

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]


@pytest.fixture(scope="module")
def database(postgres_url: str) -> Iterator[str]:
    with fresh_database(postgres_url) as url:
        yield url


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, database: str) -> Iterator[Platform]:
    root = tmp_path_factory.mktemp("verify")
    workspace = make_workspace(root / "workspace")
    with platform(root / "home", environment={"HEADRACE_DATABASE_URL": database}) as started:
        made = started.post("/workspaces", {"url": str(workspace), "name": "w"})
        assert made.status_code == 201, made.text
        started.upload("numbers")
        yield started


@pytest.fixture(scope="module")
def finished(running: Platform) -> Any:
    """A run that is not deterministic: its samples are facts, and what follows from them is not."""
    run = running.submit(run_config(advanced={"deterministic": False}), workspace="w")
    return running.wait(run, "finished")


def sql(url: str, statement: str, *arguments: object) -> Any:
    """One statement as the database's owner, past the guards that keep others from rewriting."""

    async def execute() -> Any:
        connection = await asyncpg.connect(url)
        try:
            await connection.execute("set session_replication_role = replica")
            return await connection.fetch(statement, *arguments)
        finally:
            await connection.close()

    return asyncio.run(execute())


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def path_of(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))


def test_a_run_is_rebuilt_from_its_log_alone(running: Platform, finished: Any) -> None:
    found = verify(running, finished["run"]["id"])
    assert found["status"] == "verified", found
    assert (found["steps"], found["checkpoints"]) == (4, 2)
    assert found["artifacts"] > 10
    assert found["adapter_sha256"] == final_adapter(finished)


def test_a_flipped_byte_of_the_weights_is_named(running: Platform, finished: Any) -> None:
    ref = f"{finished['run']['id']}@2"
    files = running.get(f"/checkpoints/{ref}")["checkpoint"]["manifest"]["files"]
    path = path_of(files["adapter_model.safetensors"]["uri"])
    flip(path, 1000)
    found = verify(running, finished["run"]["id"])
    flip(path, 1000)
    assert found["status"] == "differs"
    [finding] = found["findings"]
    assert (finding["kind"], finding["what"]) == ("artifact", path.as_uri())
    assert (finding["first_byte"], finding["last_byte"]) == (1000, 1000)


def test_the_tensor_of_a_flipped_byte_is_named(running: Platform, finished: Any) -> None:
    ref = f"{finished['run']['id']}@2"
    files = running.get(f"/checkpoints/{ref}")["checkpoint"]["manifest"]["files"]
    path = path_of(files["adapter_model.safetensors"]["uri"])
    last = path.stat().st_size - 1
    flip(path, last)
    found = verify(running, finished["run"]["id"])
    flip(path, last)
    [finding] = found["findings"]
    assert (finding["first_byte"], finding["last_byte"]) == (last, last)
    assert "first tensor that differs is base_model.model.model.layers.1." in finding["message"]


def test_a_flipped_byte_of_a_manifest_is_named(running: Platform, finished: Any) -> None:
    path = path_of(finished["checkpoints"][0]["uri"])
    flip(path, 40)
    found = verify(running, finished["run"]["id"])
    flip(path, 40)
    [finding] = found["findings"]
    assert (finding["what"], finding["first_byte"]) == (path.as_uri(), 40)


def test_flipped_samples_are_named(running: Platform, finished: Any, database: str) -> None:
    events = running.events(finished["run"]["id"])
    batch = next(e for e in events if e["type"] == "rl.batch.assembled")
    sha256 = batch["data"]["groups"][0]["artifact"]["sha256"]
    toggle = (
        "update artifacts set data = set_byte(data, 9, get_byte(data, 9) # 1) where sha256 = $1"
    )
    sql(database, toggle, sha256)
    found = verify(running, finished["run"]["id"])
    sql(database, toggle, sha256)
    assert found["status"] == "differs"
    assert [f["what"] for f in found["findings"]] == [f"row:{sha256}"]


def test_a_changed_reward_is_named(running: Platform, finished: Any, database: str) -> None:
    run = finished["run"]["id"]
    [row] = sql(
        database,
        "select id, data::text as data from events where run_id = $1 and type = 'rl.batch.assembled'"
        " order by position limit 1",
        run,
    )
    put = "update events set data = $2::json where id = $1"
    changed = json.loads(row["data"])
    changed["groups"][0]["rewards"][0] += 1
    sql(database, put, row["id"], json.dumps(changed))
    found = verify(running, run)
    sql(database, put, row["id"], row["data"])
    assert found["status"] == "differs"
    assert "was graded otherwise" in found["findings"][0]["message"]


def test_a_missing_event_is_named(running: Platform, finished: Any, database: str) -> None:
    run = finished["run"]["id"]
    move = "update events set run_id = $2 where stream = $1 and version = 3"
    sql(database, move, f"policy-{run}", "elsewhere")
    found = verify(running, run)
    sql(database, move, f"policy-{run}", run)
    assert found["status"] == "differs"
    assert "events are missing" in found["findings"][0]["message"]
    assert verify(running, run)["status"] == "verified"


def headrace(started: Platform, *arguments: str) -> Any:
    """The JSON that a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "producers.cli.main", *arguments, "--json"],
        env={**os.environ, **started.environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_recorded_samples_are_graded_by_a_working_tree_that_git_does_not_notice(
    running: Platform, finished: Any, tmp_path: Path
) -> None:
    """On this platform, because a commit of no branch must pass git's fetch, the sandbox and the learner
    as they are. The grader as it was recorded gives the recorded rewards, and the same gradients."""
    url = next(w["url"] for w in running.get("/workspaces")["workspaces"] if w["name"] == "w")
    workspace = Path(str(url))
    run = finished["run"]["id"]
    before = [git(workspace, *of) for of in (("rev-parse", "HEAD"), ("branch", "--all"))]
    (workspace / "notes.txt").write_text("a file that is not committed\n")
    same = headrace(running, "train", "regrade", run, "--grader", url, "--gradients")["regrade"]
    assert (same["source"], same["report"]["changed_share"]) == ("working tree", 0.0)
    assert same["report"]["reward_after"] == same["report"]["reward_before"]
    assert [one["cosine"] for one in same["gradients"]["steps"]] == [1.0] * 4

    main = workspace / "rollouts" / "say" / "main.py"
    text = main.read_text()
    main.write_text(text.replace("digits / 8", "-digits / 8"))
    try:
        other = headrace(running, "train", "regrade", run, "--grader", url, "--gradients")
    finally:
        main.write_text(text)
    found = other["regrade"]
    assert found["report"]["reward_after"] == -same["report"]["reward_before"]
    assert found["report"]["kendall_tau"] == -1.0
    cosines = [one["cosine"] for one in found["gradients"]["steps"]]
    assert cosines == pytest.approx([-1.0] * 4, abs=0.05), "clipping is not the same on both sides"
    assert found["commit"] != before[0]

    again = headrace(running, "train", "regrade", f"regrade:{found['id']}", "--reward", "grader=-1")
    assert again["regrade"]["report"]["reward_after"] == same["report"]["reward_before"]
    (workspace / "notes.txt").unlink()
    after = [git(workspace, *of) for of in (("rev-parse", "HEAD"), ("branch", "--all"))]
    assert after == before
    assert git(workspace, "status", "--porcelain") == ""
    assert verify(running, run)["status"] == "verified"
