"""The unmodified client uploads the results of an evaluation that it ran on its own machine."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.osmosis.team import Team
from tests.osmosis.workspace import ROWS, rows_of

pytestmark = [
    pytest.mark.osmosis,
    pytest.mark.processes,
    pytest.mark.postgres,
    pytest.mark.slow,
]

WRITE = """
import hashlib, json, sys, uuid
from pathlib import Path
from osmosis_ai.eval.local.dataset import format_row_selector, select_rows, sha256_of_file
from osmosis_ai.eval.local.results import Materializer, RunIdentity, select_attempts
from osmosis_ai.eval.local.state import RunManifest, TerminalRecord, utc_now
from osmosis_ai.rollout.trajectory.atif import Agent, FinalMetrics, Step, Trajectory

place, data, rewards = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
selection = select_rows(data, row_selector=(1, 3))
place.mkdir(parents=True, exist_ok=True)
if not (place / "manifest.json").exists():
    RunManifest.create(
        local_run_id=uuid.uuid4().hex,
        run_name=place.name,
        inputs={
            "model_path": "openai/some-model",
            "dataset": {
                "sha256": sha256_of_file(data),
                "selected_source_rows": format_row_selector(selection.source_row_indices),
            },
            "n": 2,
            "rollout": {"name": "sums", "entrypoint": "main.py", "source_digest": "ab" * 32},
            "versions": {"rollout_protocol": "0.4", "dataset_normalization": 1, "state_schema": 1},
        },
        provenance={"sdk_version": "0.3.8", "config_path": "configs/eval/sums.toml"},
    ).write(place / "manifest.json")
records = {}
for number, reward in enumerate(rewards):
    row, run, attempt = number // 2, number % 2, hashlib.md5(b"%d" % number).hexdigest()
    trial = place / "rollout_trials" / attempt
    (trial / "artifacts").mkdir(parents=True, exist_ok=True)
    (trial / "artifacts" / "note.txt").write_text("x" * number)
    fields = {"row_index": row, "run_index": run}
    trajectory = Trajectory(
        session_id=attempt,
        agent=Agent(name="sums", version="1"),
        steps=[
            Step(step_id=1, source="user", message=f"Say {row}"),
            Step(step_id=2, source="agent", message="<b>4</b>"),
        ],
        final_metrics=FinalMetrics(total_prompt_tokens=5, total_completion_tokens=2),
        extra={"osmosis": {"rollout_id": attempt, "request_extra_fields": fields}},
    )
    (trial / "trajectory.json").write_text(json.dumps(trajectory.to_json_dict()))
    status = "failed" if reward is None else "success"
    error = "ValueError" if reward is None else None
    record = TerminalRecord(row, run, attempt, status, reward=reward, error_type=error)
    records[record.key] = record
writer = Materializer(place)
identity = RunIdentity(
    local_run_id=json.loads((place / "manifest.json").read_text())["local_run_id"],
    run_name=place.name, dataset_name="numbers", model_name="openai/some-model",
    rollout_name="sums", started_at=utc_now(), status="finished", completed_at=utc_now(),
)
(place / "logs.txt").write_text("it ran here\\n")
writer.refresh(
    select_attempts(records, trials_dir=writer.trials_dir),
    identity=identity, pass_threshold=0.5, sampled_rows=2,
    total_dataset_rows=selection.total_dataset_rows, total_runs=4,
)
"""
"""Writes the directory of a run with the client's own code, which `eval run` uses."""

NAME = "local-sums"


def write_run(team: Team, *rewards: float | None) -> Path:
    """The directory of a run with these rewards, where the client looks for it."""
    place = team.directory / ".osmosis" / "evals" / NAME
    python = team.owner.program.with_name("python")
    arguments = [str(place), "data/numbers.jsonl", json.dumps(rewards)]
    subprocess.run(
        [python, "-c", WRITE, *arguments], cwd=team.directory, check=True, capture_output=True
    )
    return place


@pytest.fixture(scope="module")
def imported(team: Team) -> dict[str, Any]:
    """A run of two rows with two attempts each, imported; what the client says about it."""
    (team.directory / "data/numbers.jsonl").write_text(rows_of(ROWS))
    team.member.run("dataset", "upload", "data/numbers.jsonl", "--yes")
    write_run(team, 1.0, 0.0, 1.0, None)
    resource: dict[str, Any] = team.member.run("eval", "upload", NAME)["resource"]
    return resource


def test_a_local_evaluation_is_uploaded_and_shown(team: Team, imported: dict[str, Any]) -> None:
    assert (imported["status"], imported["eval_run_name"]) == ("finalized", NAME)
    assert imported["expected_files"] == imported["uploaded_files"] == 3 + 4 * 2
    found = team.viewer.run("eval", "info", NAME)["data"]
    assert found["eval_run"]["status"] == "finished"
    results = found["results"]
    counts = [results[name] for name in ("graded", "passed", "failed", "total_tokens")]
    assert counts == [3, 2, 1, 4 * 7]
    assert results["pass_rate"] == 0.5
    assert NAME in [one["name"] for one in team.viewer.run("eval", "list")["items"]]


def test_an_imported_evaluation_is_downloaded(team: Team, imported: dict[str, Any]) -> None:
    saved = team.directory.parent / "saved-import"
    done = team.viewer.run("eval", "download", NAME, "--type", "all", "-o", str(saved), "--yes")
    assert done["resource"]["files_failed"] == []
    assert (saved / "logs.txt").read_text() == "it ran here\n"
    assert sorted(len(one.read_bytes()) for one in saved.rglob("note.txt")) == [0, 1, 2, 3]
    [first] = saved.rglob("row-000001/attempt-000.json")
    assert json.loads(first.read_text())["messages"][-1]["content"] == "<b>4</b>"


def test_a_second_upload_changes_nothing(team: Team, imported: dict[str, Any]) -> None:
    again = team.member.run("eval", "upload", NAME)["resource"]
    same = ("session_id", "eval_run_id", "eval_run_name", "status")
    assert [again[name] for name in same] == [imported[name] for name in same]


def test_a_retry_names_the_command_for_the_machine(team: Team, imported: dict[str, Any]) -> None:
    refused = team.member.refused("eval", "retry", NAME, "--yes")
    assert "osmosis eval run configs/eval/sums.toml --name local-sums" in refused.message


def test_a_viewer_uploads_no_evaluation(team: Team, imported: dict[str, Any]) -> None:
    assert "submit" in team.viewer.refused("eval", "upload", NAME).message


def test_other_results_are_uploaded_with_replace(team: Team, imported: dict[str, Any]) -> None:
    """It is the last of this file, because it changes the results."""
    write_run(team, 1.0, 1.0, 1.0, 1.0)
    refused = team.member.refused("eval", "upload", NAME)
    assert refused.code == "CONFLICT"
    assert "--replace" in refused.message
    done = team.member.run("eval", "upload", NAME, "--replace")["resource"]
    assert done["eval_run_id"] == imported["eval_run_id"]
    results = team.viewer.run("eval", "info", NAME)["data"]["results"]
    assert (results["graded"], results["passed"], results["pass_rate"]) == (4, 4, 1.0)
