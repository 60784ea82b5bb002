"""Generates the rows of tasks of a package, confined, with the packages of the rollouts that score them.

The generators are code of others. They run like the code of a rollout: without a network, without a
secret and with limits. Nothing but the file that they leave is read.
"""

import json
from functools import cache
from pathlib import Path

from headrace import reasoning_tasks
from infra.ports.packages import DeclaredPackages
from infra.sandbox.environments.environments import PackageEnvironments
from infra.sandbox.written_trees import read_file
from schemas.errors import Refused
from schemas.toml.generated_tasks import OVERRIDES, REQUIREMENTS, GeneratedTasks

MOST_BYTES = 512 << 20
WITHIN_S = 600.0
SHOWN = 2_000


async def generate_rows(tasks: GeneratedTasks, environments: PackageEnvironments) -> bytes:
    """The rows of a dataset as JSON Lines. Raises Refused when the packages cannot be installed, and
    with the reason when the tasks cannot be generated."""
    what = f"the tasks of {tasks.task}"
    declared = DeclaredPackages(path=what, dependencies=REQUIREMENTS, overrides=OVERRIDES)
    argv = ("-I", "-c", _program(), json.dumps(tasks.request))
    async with environments.run_python(
        declared, argv, most_bytes=MOST_BYTES, within_s=WITHIN_S
    ) as (folder, failure):
        if failure is None:
            rows = read_file(folder, str(reasoning_tasks.ROWS), most=MOST_BYTES)
            if rows is not None:
                return rows
        why = read_file(folder, str(reasoning_tasks.REFUSED), most=SHOWN) or b""
    ended = f"the generator ended with: {failure or 'no rows'}"
    raise Refused(f"{what} cannot be generated: {why.decode(errors='replace') or ended}")


@cache
def _program() -> str:
    """The program that generates. It is a text, because the place of our code may be private."""
    return Path(reasoning_tasks.__file__).read_text()
