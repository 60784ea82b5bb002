"""`headrace eval import`: the results of an evaluation that `osmosis eval run` made on this machine."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.datasets.staged import file_digest, send_parts
from producers.cli.display.output import Document, Output, fields, say
from producers.cli.errors import Failure

AT_ONCE = 100
"""How many files are asked for in one request."""

PROVENANCE = (
    *("sdk_version", "git_head", "git_branch", "git_dirty"),
    *("config_branch", "config_commit_sha", "config_path"),
)


@command(None, "import", example="headrace eval import .osmosis/evals/sums-1")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--workspace", help="Workspace of the evaluation. Default: the only one.")
@click.option("--replace", is_flag=True, help="Replace results of this run imported before.")
def import_results(
    client: Client, directory: Path, *, workspace: str | None, replace: bool, as_json: bool
) -> Output:
    """Import the results of a local evaluation.

    DIRECTORY is what a finished `osmosis eval run` left. Headrace neither sampled nor graded these
    results, and says so. The dataset must be on the server.
    """
    files = find_files(directory)
    request = {**describe(directory), "reimport": replace}
    request["files"] = [
        {"path": path, "size": file.stat().st_size, "sha256": file_digest(file)}
        for path, file in files.items()
    ]
    if workspace is not None:
        request["workspace"] = workspace
    session: Document = client.post("/evals/imports", request)["import"]
    place = f"/evals/imports/{path_segment(str(session['id']))}"
    pending = [str(one["path"]) for one in session["files"] if one["state"] == "pending"]
    if pending and not as_json:
        say(f"sending {len(pending)} files ...")
    for start in range(0, len(pending), AT_ONCE):
        asked = {"paths": pending[start : start + AT_ONCE]}
        for one in client.post(f"{place}/uploads", asked)["files"]:
            _send(client, place, one, files[one["path"]])
    done: Document = client.post(f"{place}/finalize", {})["import"]
    pairs = [("evaluation", done["eval_name"]), ("id", done["eval"]), ("import", done["number"])]
    return Output({"import": done}, fields("Imported", pairs))


def _send(client: Client, place: str, planned: Document, file: Path) -> None:
    def renew() -> Document:
        """The plan of the same upload with new URLs."""
        plan: Document = client.post(f"{place}/uploads", {"paths": [path]})["files"][0]["upload"]
        return plan

    path = planned["path"]
    with file.open("rb") as stream:
        parts = send_parts(client, stream, planned["upload"], renew=renew)
    client.post(f"{place}/uploads/complete", {"path": path, "parts": parts})


def describe(directory: Path) -> Document:
    """The run that the files of a directory describe. Raises Failure."""
    manifest, metrics = _read(directory / "manifest.json"), _read(directory / "metrics.json")
    try:
        inputs, run = manifest["inputs"], metrics["eval_run"]
        recorded = manifest.get("provenance") or {}
        provenance = {key: recorded[key] for key in PROVENANCE if recorded.get(key) is not None}
        rollout = {
            "name": inputs["rollout"]["name"],
            "source_digest": inputs["rollout"]["source_digest"],
            "branch": provenance.get("config_branch"),
            "commit_sha": provenance.get("config_commit_sha"),
        }
        return {
            "schema_version": manifest["schema_version"],
            "local_run_id": manifest["local_run_id"],
            "manifest_digest": _digest((directory / "manifest.json").read_bytes()),
            "run": {
                "name": manifest["run_name"],
                "started_at": run["started_at"],
                "completed_at": run["completed_at"],
                "experiment_config": {
                    "rollout": rollout,
                    "entrypoint": inputs["rollout"]["entrypoint"],
                    "model_path": inputs["model_path"],
                    "dataset": {**inputs["dataset"], "name": run["dataset_name"]},
                },
                "evaluation_config": {
                    "n": inputs["n"],
                    "pass_threshold": metrics["summary"]["pass_threshold"],
                },
            },
            "provenance": provenance,
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise Failure(
            "VALIDATION",
            f"{directory} has no results of a finished evaluation: {error} is missing; let it finish "
            "with `osmosis eval run`",
        ) from error


def find_files(directory: Path) -> dict[str, Path]:
    """The files to import by their paths. Raises Failure for a link, which may lead elsewhere."""
    found = {path: directory / path for path in ("index.jsonl", "progress.json")}
    if (directory / "logs.txt").exists():
        found["logs.txt"] = directory / "logs.txt"
    for line in _lines(directory / "index.jsonl"):
        attempt = Path("rollout_trials") / str(line.get("rollout_id"))
        if name := line.get("trajectory_filename"):
            found[(attempt / str(name)).as_posix()] = directory / attempt / str(name)
        artifacts = directory / attempt / "artifacts"
        for file in sorted(artifacts.rglob("*")):
            path = file.relative_to(directory).as_posix()
            is_list = path == (attempt / "artifacts" / "manifest.json").as_posix()
            if (file.is_file() or file.is_symlink()) and not is_list:
                found[path] = file
    for path, file in found.items():
        ours = directory.resolve()
        if file.is_symlink() or not file.is_file() or not file.resolve().is_relative_to(ours):
            raise Failure("VALIDATION", f"{path} must be a file in {directory}, and not a link")
    return dict(sorted(found.items()))


def _read(file: Path) -> Document:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Failure("VALIDATION", f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise Failure("VALIDATION", f"{file} is not a JSON object")
    return value


def _lines(file: Path) -> Iterator[Document]:
    try:
        values = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise Failure("VALIDATION", f"{file} cannot be read: {error}") from error
    yield from (value for value in values if isinstance(value, dict))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
