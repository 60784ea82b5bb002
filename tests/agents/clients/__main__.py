"""Runs one client: `python tests/agents/clients NAME BASE_URL API_KEY PROMPT` writes its answer."""

import asyncio
import importlib
import sys

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    sys.stdout.write(asyncio.run(importlib.import_module(name).run(*arguments)) + "\n")
