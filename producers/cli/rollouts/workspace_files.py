"""The rollouts of the workspace around the current directory, and their configs, as files."""

import contextlib
import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from producers.cli.config_files import read_config
from producers.cli.display.output import Document
from producers.cli.errors import Failure

MAIN = "main.py"
WATCHED = frozenset({".py", ".toml", ".jsonl", ".csv", ".json", ".txt", ".md"})
SKIPPED = frozenset({".git", ".venv", "__pycache__", "node_modules"})


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout of a workspace with its config, if it has one."""

    name: str
    workspace: Path
    config_path: Path | None
    config: Document | None

    def request(self) -> dict[str, object]:
        """Its part of the request for a try-out."""
        return {
            "workspace": str(self.workspace),
            "rollout": self.name,
            "config": self.config,
            "config_path": str(self.config_path or ""),
        }


def workspace_around(place: Path) -> Path:
    """The nearest directory above `place`, or it itself, that has rollouts or headrace.toml. Raises
    Failure when there is none."""
    start = place.resolve()
    for directory in (start, *start.parents):
        if (directory / "rollouts").is_dir() or (directory / "headrace.toml").is_file():
            return directory
    raise Failure(
        "NOT_A_WORKSPACE",
        f"{start} is not in a workspace, because no directory above it has rollouts/; make a rollout "
        "with `headrace rollout init NAME`, or a workspace with `headrace workspace init DIR`",
    )


def names_in(workspace: Path) -> list[str]:
    """The names of a workspace's rollouts."""
    return sorted(path.parent.name for path in workspace.glob(f"rollouts/*/{MAIN}"))


def find_rollout(name: str, config: Path | None = None) -> Rollout:
    """A rollout by its name. Without `config`, its config is the file of its name under
    configs/training, or the first one that names it. Raises Failure when there is no such
    rollout."""
    workspace = workspace_around(Path.cwd())
    names = names_in(workspace)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise Failure(
            "NOT_FOUND",
            f"there is no rollouts/{name}/{MAIN} in {workspace}{meant or '; it has: '}"
            + ("" if meant else ", ".join(names) or "none"),
        )
    path = config or config_of(workspace, name)
    return Rollout(name, workspace, path, read_config(path) if path else None)


def config_of(workspace: Path, name: str) -> Path | None:
    """The config of a rollout: the file of its name, or the first one that names it. Those of training
    come first."""
    training = workspace / "configs" / "training"
    own = training / f"{name}.toml"
    if own.is_file():
        return own
    found = workspace.glob("configs/*/*.toml")
    for path in sorted(found, key=lambda one: (one.parent != training, one)):
        try:
            experiment = read_config(path).get("experiment")
        except Failure:
            continue
        if isinstance(experiment, dict) and experiment.get("rollout") == name:
            return path
    return None


def file_states(workspace: Path) -> frozenset[tuple[str, int, int]]:
    """The files of a workspace that are watched, each with the time of its last change and its size. A
    file that cannot be read, such as the dangling link of an editor's lock, is left out."""
    found = set()
    for directory, folders, files in os.walk(workspace):
        folders[:] = [name for name in folders if name not in SKIPPED]
        for path in (Path(directory) / name for name in files if Path(name).suffix in WATCHED):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.add((str(path), status.st_mtime_ns, status.st_size))
    return frozenset(found)
