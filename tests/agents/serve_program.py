"""Runs in the environment of a rollout: `python serve_program.py ENTRYPOINT REQUESTS` starts the program
of the entry point, makes the attempts of a JSON list, and prints their rewards."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from headrace.servers.attempts import AttemptFailed, ServedAttempt
from headrace.servers.dialects import find_dialect, rollouts_of
from headrace.servers.program import start_program


async def main() -> None:
    program = await start_program(Path(sys.argv[1]))
    try:
        dialect = await find_dialect(program.server)
        rollouts = rollouts_of(program.server, dialect)

        async def make(request: dict[str, Any]) -> float | str | None:
            try:
                return (await rollouts.make(ServedAttempt(**request))).reward
            except AttemptFailed as error:
                return error.message

        rewards = await asyncio.gather(*map(make, json.loads(sys.argv[2])))
        answer = {"dialect": dialect, "rewards": rewards, "output": program.tail()}
    finally:
        with contextlib.suppress(ProcessLookupError):
            program.process.kill()
        await program.end()
    sys.stdout.write("\n" + json.dumps(answer))


asyncio.run(main())
