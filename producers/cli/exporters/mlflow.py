"""MLflow: a new MLflow run, tagged with ours, at a tracking server or any other tracking URI."""

import os
import re
import time
from collections.abc import Mapping

from producers.cli.exporters.sink import (
    ExportedRun,
    flatten_config,
    import_library,
    translating_errors,
)

UNKNOWN = re.compile(r"[^\w\-./ ]")
"""The characters that MLflow does not accept in the name of a metric."""
MAX_PARAMETER_CHARS = 500
"""The maximum length of a parameter's value."""
RETRIES = "2"
"""How often MLflow's client retries. With its own default a user would wait for minutes."""
STATUS = {"failed": "FAILED", "crashed": "FAILED", "killed": "KILLED"}


class MLflow:
    """An MLflow run. `uri` None: MLFLOW_TRACKING_URI, or MLflow's own default."""

    def __init__(self, subject: ExportedRun, *, experiment: str, uri: str | None) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", RETRIES)
        mlflow = import_library("mlflow")
        self._entities = import_library("mlflow.entities")
        self._hint = _hint(uri)
        with translating_errors("MLflow", self._hint):
            self._client = mlflow.MlflowClient(uri)
            existing = self._client.get_experiment_by_name(experiment)
            identity = (
                existing.experiment_id if existing else self._client.create_experiment(experiment)
            )
            created = self._client.create_run(
                identity, run_name=subject.name, tags={"headrace.run": subject.run}
            )
            self._run = created.info.run_id
            for key, value in flatten_config(subject.config):
                self._client.log_param(self._run, key, value[:MAX_PARAMETER_CHARS])
        self._experiment = identity

    @property
    def place(self) -> str:
        return f"MLflow experiment {self._experiment}, run {self._run}"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(UNKNOWN.sub("_", key), value, now, step)
            for key, value in values.items()
        ]
        with translating_errors("MLflow", self._hint):
            self._client.log_batch(self._run, metrics=metrics)

    def close(self, status: str) -> None:
        with translating_errors("MLflow", self._hint):
            self._client.set_terminated(self._run, STATUS.get(status, "FINISHED"))


def _hint(uri: str | None) -> str:
    named = uri or os.environ.get("MLFLOW_TRACKING_URI")
    where = f"the tracking URI is {named}" if named else "no tracking URI is set"
    return (
        f"{where}; start a server with `mlflow server` and pass --uri http://host:port or set "
        "MLFLOW_TRACKING_URI (a sqlite:/// or postgresql:// store needs `pip install mlflow`)"
    )
