"""The files of an evaluation that the client's own program ran on a machine, without that program."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

RUN = "a1" * 16
STARTED, COMPLETED = "2026-11-28T10:00:00Z", "2026-11-28T10:00:30Z"


def attempt_id(row: int, run: int) -> str:
    return hashlib.md5(f"{row}/{run}".encode(), usedforsecurity=False).hexdigest()


def trajectory(row: int, run: int, text: str = "It is 4") -> dict[str, Any]:
    """A trajectory with a tool call, as the client writes it."""
    call = {"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 2, "b": 2}}
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": attempt_id(row, run),
        "agent": {"name": "sums", "version": "1"},
        "steps": [
            {"step_id": 1, "source": "user", "message": f"Say {row}"},
            {
                "step_id": 2,
                "source": "agent",
                "message": "",
                "tool_calls": [call],
                "observation": {"results": [{"source_call_id": "c1", "content": "4"}]},
            },
            {"step_id": 3, "source": "agent", "message": text, "reasoning_content": "add"},
        ],
        "final_metrics": {"total_prompt_tokens": 7, "total_completion_tokens": 3},
        "extra": {"osmosis": {"request_extra_fields": {"row_index": row, "run_index": run}}},
    }


def line(row: int, run: int, reward: float | None = 1.0, **more: Any) -> dict[str, Any]:
    """A line of the index."""
    return {
        "row_index": row,
        "run_index": run,
        "rollout_id": attempt_id(row, run),
        "trajectory_filename": "trajectory.json",
        "status": "success",
        "reward": reward,
        "tokens": 10,
        "duration_ms": 5.0,
    } | more


def in_lines(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in lines).encode()


@dataclass(frozen=True)
class LocalEvaluation:
    """An evaluation of rows 1 and 3 of a dataset with two runs each. One run failed, one was skipped."""

    dataset: bytes
    files: Mapping[str, bytes] = field(default_factory=dict)
    name: str = "local-one"
    manifest: str = "ab" * 32

    def with_file(self, path: str, data: bytes) -> "LocalEvaluation":
        return replace(self, files={**self.files, path: data})

    def write(self, root: Path) -> Path:
        """The directory that the program leaves, below `root`."""
        place, run = root / self.name, self.request()["run"]
        experiment = run["experiment_config"]
        written = {
            **self.files,
            "manifest.json": json.dumps(
                {
                    "schema_version": 1,
                    "local_run_id": RUN,
                    "run_name": self.name,
                    "created_at": STARTED,
                    "inputs": {
                        "model_path": experiment["model_path"],
                        "dataset": {
                            key: experiment["dataset"][key]
                            for key in ("sha256", "selected_source_rows")
                        },
                        "n": 2,
                        "rollout": {
                            "name": "sums",
                            "entrypoint": "main.py",
                            "source_digest": "sha256:1",
                        },
                        "versions": {"state_schema": 1},
                    },
                    "provenance": {"config_path": "configs/eval/sums.toml", "git_dirty": False},
                }
            ).encode(),
            "metrics.json": json.dumps(
                {
                    "eval_run": {
                        "id": RUN,
                        "name": self.name,
                        "status": "finished",
                        "dataset_name": "numbers",
                        "model_name": experiment["model_path"],
                        "rollout_name": "sums",
                        "started_at": STARTED,
                        "completed_at": COMPLETED,
                    },
                    "summary": {"pass_threshold": 0.5},
                }
            ).encode(),
        }
        for path, data in written.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(data)
        return place

    def request(self, **more: Any) -> dict[str, Any]:
        """What the client announces."""
        files = [
            {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for path, data in sorted(self.files.items())
        ]
        return {
            "schema_version": 1,
            "local_run_id": RUN,
            "manifest_digest": self.manifest,
            "run": {
                "name": self.name,
                "started_at": STARTED,
                "completed_at": COMPLETED,
                "experiment_config": {
                    "rollout": {"name": "sums", "source_digest": "sha256:1", "branch": "main"},
                    "entrypoint": "main.py",
                    "model_path": "openai/gpt-mini",
                    "dataset": {
                        "name": "numbers",
                        "sha256": hashlib.sha256(self.dataset).hexdigest(),
                        "selected_source_rows": "1,3",
                    },
                },
                "evaluation_config": {"n": 2, "pass_threshold": 0.5},
            },
            "schema_versions": {"state_schema": 1},
            "provenance": {"config_path": "configs/eval/sums.toml", "git_dirty": False},
            "files": files,
            "reimport": False,
        } | more


def local_evaluation(dataset: bytes, *, text: str = "It is 4") -> LocalEvaluation:
    """An evaluation with three trajectories, a file of an attempt, an empty one, and a log."""
    lines = [
        line(0, 0),
        line(0, 1, 0.25),
        line(1, 0, None, status="failed", error_type="ValueError"),
        line(1, 1, None, status="skipped", trajectory_filename=None, tokens=None),
    ]
    files = {
        "index.jsonl": in_lines(lines),
        "progress.json": json.dumps(
            {"total_runs": 4, "sampled_rows": 2, "total_dataset_rows": dataset.count(b"\n")}
        ).encode(),
        "logs.txt": b"it ran\n",
        f"rollout_trials/{attempt_id(0, 0)}/artifacts/notes/\u00fcber.txt": b"<b>a note</b>",
        f"rollout_trials/{attempt_id(0, 0)}/artifacts/empty": b"",
    }
    for row, run in ((0, 0), (0, 1), (1, 0)):
        data = json.dumps(trajectory(row, run, text)).encode()
        files[f"rollout_trials/{attempt_id(row, run)}/trajectory.json"] = data
    return LocalEvaluation(dataset, files)
