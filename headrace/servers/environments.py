"""The program that serves an environment of the package `verifiers` as a rollout server.

The rollout's entry point defines the environment: with `load_environment()`, or with a taskset. A table
[tool.headrace.environment] in the rollout's pyproject.toml configures it.
"""

import asyncio
import importlib
import importlib.util
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any, Protocol

from headrace.servers.attempts import Json
from headrace.servers.recognition import rollout_folder
from headrace.servers.serving import RolloutServer

TASK = "task"
"""The key of a row's metadata that holds its task, as JSON text."""

PORT = "_OSMOSIS_ROLLOUT_PORT"


class RolloutMaker(Protocol):
    """An environment, whatever its library calls it. `capacity` says how many rollouts it may make at
    the same time."""

    capacity: int | None

    async def start(self) -> None:
        """Make everything ready that rollouts share."""
        ...

    async def make(self, request: Json) -> float:
        """Make the rollout of a request and return its reward. Raises RolloutFailed."""
        ...

    def rows(self, most: int | None) -> list[Json]:
        """Return the rows of a dataset with its tasks, at most this many."""
        ...


def load_environment(entrypoint: Path) -> RolloutMaker:
    """Return the environment of an entry point."""
    folder = str(entrypoint.parent)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (folder, os.environ.get("PYTHONPATH", "")))
    )
    module = importlib.import_module(entrypoint.stem)
    settings = environment_settings(entrypoint)
    if hasattr(package("verifiers"), "load_environment"):
        from headrace.servers.verifiers_v0 import OlderEnvironment

        return OlderEnvironment(module, settings)
    from headrace.servers.verifiers_v1 import TasksetEnvironment

    return TasksetEnvironment(module, settings)


def package(name: str) -> Any:
    """Import a module of a package that only the rollout's own environment has."""
    return importlib.import_module(name)


def environment_settings(entrypoint: Path) -> Json:
    """Return the table [tool.headrace.environment] of a rollout's pyproject.toml, if there is one."""
    try:
        project = tomllib.loads((rollout_folder(entrypoint) / "pyproject.toml").read_text())
        settings = project["tool"]["headrace"]["environment"]
    except (OSError, KeyError, TypeError):
        return {}
    return settings if isinstance(settings, dict) else {}


def task_of(request: Json) -> object:
    """Return the task in a request: a JSON object, the number of a task, or None."""
    task = (request.get("metadata") or {}).get(TASK)
    return json.loads(task) if isinstance(task, str) else task


def main() -> None:
    """Serve the environment of the entry point that is the argument."""
    environment = load_environment(Path(sys.argv[1]))

    async def serve() -> None:
        await environment.start()
        server = RolloutServer(environment.make, capacity=environment.capacity)
        await server.serve(int(os.environ[PORT]))

    asyncio.run(serve())


if __name__ == "__main__":
    main()
