"""One submit is one connected trace, from the command line to the last checkpoint; a collector that is
dead changes nothing."""

import asyncio
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.operations.local.free_port import free_port
from producers.cli.demo.post_receive import deliver
from tests.kit.in_memory import in_memory
from tests.kit.otlp import Collector, Seen, collector
from tests.kit.platform import (
    ROWS,
    Platform,
    eventually,
    final_adapter,
    git,
    make_workspace,
    platform,
)
from tests.kit.pushed_workspace import PushedWorkspace, commit, make_bare, make_clone

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

CONFIG = """
[experiment]
rollout = "say"
entrypoint = "main.py"
model_path = "scratch:qwen3-tiny"
dataset = "numbers"
[training]
lr = 1e-2
n_samples_per_prompt = 4
rollout_batch_size = 2
max_prompt_length = 64
max_response_length = 6
[checkpoints]
checkpoint_save_freq = 2
[advanced]
max_steps = 4
seed = 7
deterministic = true
"""


WORKSPACE = {"configs/training/run.toml": CONFIG}


@dataclass(frozen=True)
class Traced:
    """A platform, and the collector that it sends its spans to."""

    platform: Platform
    collector: Collector


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with collector() as held:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": held.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "HEADRACE_POLL_S": "0",
        }
        home = tmp_path_factory.mktemp("traced") / "home"
        with platform(home, environment=environment) as started:
            started.upload("numbers")
            yield Traced(started, held)


def submitted(started: Platform, root: Path) -> Any:
    """A finished run, submitted by the command line."""
    workspace = make_workspace(root / "workspace", WORKSPACE)
    made = started.post("/workspaces", {"url": str(workspace), "name": "w"})
    assert made.status_code == 201, made.text
    program = [sys.executable, "-m", "producers.cli.main", "train", "submit"]
    asked = [*program, "configs/training/run.toml", "--workspace", "w", "--json"]
    done = subprocess.run(
        asked, cwd=workspace, env=started.environment, capture_output=True, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    return started.wait(json.loads(done.stdout)["run"]["id"], "finished")


def test_one_submit_is_one_connected_trace(traced: Traced, tmp_path: Path) -> None:
    submitted(traced.platform, tmp_path)

    def walked() -> list[Seen] | None:
        spans = list(traced.collector.spans.values())
        [command] = [s for s in spans if s.name == "headrace POST /runs"]
        found = traced.collector.following(command)
        return found if _checkpoints(found) >= 2 else None

    found = eventually(walked, within_s=20, what="the trace reaches the last checkpoint")
    services = {span.service for span in found}
    assert {"headrace-cli", "headrace-control"} < services
    assert len(services) == 3
    performed = {span.name for span in found if " perform " in span.name}
    assert performed == {
        "sync perform FetchCommit",
        "learn perform InitializePolicy",
        "rollout perform GenerateSample",
        "grade perform GradeGroup",
        "learn perform TrainStep",
        "checkpoint perform SaveCheckpoint",
    }
    assert sum(span.name == "learn perform TrainStep" for span in found) == 4


def _checkpoints(found: list[Seen]) -> int:
    return sum(span.name == "checkpoint perform SaveCheckpoint" for span in found)


def test_one_push_is_one_connected_trace_from_its_webhook(traced: Traced, tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    bare = make_bare(clone, tmp_path / "math.git")
    workspace = PushedWorkspace.connect(traced.platform, str(bare), name="math", forge="none")
    sha = commit(clone)
    git(clone, "push", "-q", "origin", "main")
    told = deliver(
        workspace.hook["url"], workspace.hook["secret"], "a" * 40, sha, "refs/heads/main"
    )
    assert told.startswith("202")
    traced.platform.wait(workspace.wait_for_run(sha)["run"], "finished")

    def walked() -> list[Seen] | None:
        spans = list(traced.collector.spans.values())
        [webhook] = [s for s in spans if s.name == "POST /webhooks/math"]
        found = traced.collector.following(webhook)
        return found if _checkpoints(found) >= 1 and _posted(found) >= 2 else None

    found = eventually(walked, within_s=20, what="the trace reaches the last status")
    performed = {span.name for span in found if " perform " in span.name}
    assert {
        "sync perform ListRefs",
        "trigger perform ExaminePush",
        "trigger perform SubmitRun",
        "sync perform FetchCommit",
        "learn perform TrainStep",
        "checkpoint perform SaveCheckpoint",
        "status perform PostStatus",
    } <= performed


def _posted(found: list[Seen]) -> int:
    return sum(span.name == "status perform PostStatus" for span in found)


async def _trained_without_spans(home: Path, workspace: Path) -> str:
    """The weights that the run ends with where nothing is traced, and no component is involved."""
    rows = home / "rows.jsonl"
    rows.write_text(ROWS)
    async with in_memory(home / "home") as started, asyncio.timeout(360):
        await started.workspaces.add(str(workspace), "w")
        await started.upload("numbers", rows)
        await started.run_to_end(tomllib.loads(CONFIG), workspace="w")
        return started.final_adapter()


@pytest.mark.kills
def test_a_dead_collector_changes_nothing(tmp_path: Path) -> None:
    dead = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    with platform(tmp_path / "dead", environment=dead) as started:
        started.upload("numbers")
        with_it = final_adapter(submitted(started, tmp_path / "a"))
    workspace = make_workspace(tmp_path / "b", WORKSPACE)
    assert with_it == asyncio.run(_trained_without_spans(tmp_path, workspace))
