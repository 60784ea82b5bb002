"""Runs one client, `python tests/agents/clients NAME`, for many attempts at the same time.

Each line of standard input is JSON with a base URL, an API key and a prompt. Each answer is a line with
the key and the text, or the error.
"""

import asyncio
import importlib
import json
import sys


async def attempt(run, asked: dict[str, str]) -> None:
    """Run the client once, and write its answer."""
    try:
        said = {"text": await run(asked["base_url"], asked["api_key"], asked["prompt"])}
    except Exception as error:  # the test decides what an error means
        said = {"error": repr(error)}
    sys.stdout.write(json.dumps({"api_key": asked["api_key"], **said}) + "\n")
    sys.stdout.flush()


async def serve(name: str) -> None:
    run = importlib.import_module(name).run
    loop = asyncio.get_running_loop()
    tasks = []
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        tasks.append(asyncio.ensure_future(attempt(run, json.loads(line))))
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
