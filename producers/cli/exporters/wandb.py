"""Weights & Biases: a new W&B run, in a group named after ours; offline on request.

The x axis is the metric `step`, not W&B's own counter, because that one drops points of earlier steps. A
validation that ends late adds such points.
"""

from collections.abc import Mapping
from pathlib import Path

from producers.cli.exporters.sink import ExportedRun, import_library, translating_errors

HINT = (
    "log in with `wandb login` or set WANDB_API_KEY, or write files with --offline and upload them "
    "later with `wandb sync`"
)


class WeightsAndBiases:
    """A W&B run. `offline`: files under `directory`, for `wandb sync`."""

    def __init__(
        self, subject: ExportedRun, *, project: str, directory: Path, offline: bool
    ) -> None:
        wandb = import_library("wandb")
        directory.mkdir(parents=True, exist_ok=True)
        self._library = wandb
        with translating_errors("W&B", HINT):
            self._run = wandb.init(
                project=project,
                name=subject.name,
                group=subject.run,
                config={**subject.config, "headrace_run": subject.run},
                dir=str(directory),
                mode="offline" if offline else None,
                settings=wandb.Settings(console="off", silent=True, disable_git=True),
            )
            self._run.define_metric("*", step_metric="step")
        self._offline = offline

    @property
    def place(self) -> str:
        if self._offline:
            return f"wandb sync {Path(self._run.dir).parent}"
        return str(self._run.url)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with translating_errors("W&B", HINT):
            self._run.log({"step": step, **values})

    def close(self, status: str) -> None:
        """Return when everything is written. `finish` alone leaves that to W&B's service, which does it
        a moment later."""
        code = 0 if status in ("finished", "stopped", "running") else 1
        with translating_errors("W&B", HINT):
            self._run.summary["status"] = status
            self._run.finish(exit_code=code)
            self._library.teardown(exit_code=code)
