"""`headrace train export`: export the curves of a run to TensorBoard, W&B or MLflow.

It is an ordinary client of the API. The server needs none of these libraries, and any machine can export
a run while it is running or long afterwards.
"""

import time
from pathlib import Path
from typing import Any

from producers.cli.client import Client, path_segment
from producers.cli.display.units import count_of
from producers.cli.errors import Failure, Interrupted
from producers.cli.exporters.mlflow import MLflow
from producers.cli.exporters.sink import ExportedRun, NewPoints, Opener, Sink
from producers.cli.exporters.tensorboard import TensorBoard
from producers.cli.exporters.wandb import WeightsAndBiases

FINAL = ("finished", "failed", "stopped", "killed", "crashed", "rejected")
POLL_S = 2.0


def opener_for(
    tracker: str, *, directory: Path, project: str, offline: bool, uri: str | None
) -> Opener:
    """The function that opens an export to `tracker`. Raises Failure for an option that `tracker` does
    not have."""
    if offline and tracker != "wandb":
        raise Failure(
            "INVALID_OPTION", "--offline works only with --to wandb; remove it, or export to wandb"
        )
    if uri is not None and tracker != "mlflow":
        raise Failure(
            "INVALID_OPTION", "--uri works only with --to mlflow; remove it, or export to mlflow"
        )
    openers: dict[str, Opener] = {
        "tensorboard": lambda subject: TensorBoard(subject, directory=directory),
        "wandb": lambda subject: WeightsAndBiases(
            subject, project=project, directory=directory, offline=offline
        ),
        "mlflow": lambda subject: MLflow(subject, experiment=project, uri=uri),
    }
    return openers[tracker]


def export_run(client: Client, ref: str, open_sink: Opener, *, follow: bool) -> dict[str, Any]:
    """Export all points so far, and with `follow` all further points until the run ends. Returns the
    place of the export and the number of steps that have points. Raises Interrupted on SIGINT."""
    answer = client.get(f"/runs/{path_segment(ref)}")
    found = answer["run"]
    name = str(found.get("name") or found["id"])
    if found.get("archived_at"):
        raise Failure(
            "ARCHIVED",
            f"run {name} is archived, and so are its curves; restore them with: headrace train restore "
            f"{name}",
        )
    sink = open_sink(ExportedRun(run=str(found["id"]), name=name, config=found.get("config") or {}))
    new, steps = NewPoints(), set[int]()
    try:
        while True:
            for step, values in new.of(answer["metrics"]):
                sink.write(step, values)
                steps.add(step)
            status = str(answer["run"]["status"])
            if not follow or status in FINAL:
                return {"run": found["id"], "steps": len(steps), "place": _close(sink, status)}
            time.sleep(POLL_S)
            answer = client.get(f"/runs/{path_segment(ref)}")
    except KeyboardInterrupt as error:
        place = _close(sink, "running")
        raise Interrupted(
            f"stopped exporting after {count_of(len(steps), 'step')} ({place}); the run {name} continues"
        ) from error


def _close(sink: Sink, status: str) -> str:
    place = sink.place
    sink.close(status)
    return place
