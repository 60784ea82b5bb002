"""The program that serves an environment of the package `verifiers` as a rollout server.

The rollout's entry point defines the environment: with `load_environment()`, or with a taskset. A table
[tool.headrace.environment] in the rollout's pyproject.toml configures it.
"""

import asyncio
import importlib
import os
import sys
import tomllib
from pathlib import Path
from typing import Protocol

from headrace.error_location import rollout_folder
from headrace.servers.attempts import Json
from headrace.servers.serving import RolloutServer
from headrace.servers.verifiers_v0 import OlderEnvironment
from headrace.servers.verifiers_v1 import TasksetEnvironment

PORT = "_OSMOSIS_ROLLOUT_PORT"


class VerifiersEnvironment(Protocol):
    """An environment of either line of `verifiers`. `capacity` says how many rollouts it may make at
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


def load_verifiers_environment(entrypoint: Path) -> VerifiersEnvironment:
    """Return the environment of an entry point."""
    folder = str(entrypoint.parent)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (folder, os.environ.get("PYTHONPATH", "")))
    )
    module = importlib.import_module(entrypoint.stem)
    settings = read_settings(entrypoint)
    is_older = hasattr(importlib.import_module("verifiers"), "load_environment")
    return OlderEnvironment(module, settings) if is_older else TasksetEnvironment(module, settings)


def read_settings(entrypoint: Path) -> Json:
    """Return the table [tool.headrace.environment] of a rollout's pyproject.toml, if there is one."""
    try:
        project = tomllib.loads((rollout_folder(entrypoint) / "pyproject.toml").read_text())
        settings = project["tool"]["headrace"]["environment"]
    except (OSError, KeyError, TypeError):
        return {}
    return settings if isinstance(settings, dict) else {}


def main() -> None:
    """Serve the environment of the entry point that is the argument."""
    environment = load_verifiers_environment(Path(sys.argv[1]))

    async def serve() -> None:
        await environment.start()
        server = RolloutServer(environment.make, capacity=environment.capacity)
        await server.serve(int(os.environ[PORT]))

    asyncio.run(serve())


if __name__ == "__main__":
    main()
