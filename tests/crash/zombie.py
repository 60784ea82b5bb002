"""A learner's process for tests that need many: forked from one that has imported torch already.

context = forkserver(); process = context.Process(target=learn, args=(...))
"""

import multiprocessing
import os
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

from consumers.process.command import main
from consumers.registry import REGISTRY

CONSUMERS = ("learn", "checkpoint", "verify")
"""The consumers that `headrace up` hosts in its learner."""

HEAVY = ("tests.crash.zombie", "consumers.process.worker", "trainer.engine", "transformers")


def forkserver() -> ForkServerContext:
    """Where processes are forked from; started with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*HEAVY, *(REGISTRY[name] for name in CONSUMERS)])
    return context


def learn(home: Path, database_url: str, worker: str, failpoint: str) -> None:
    """`python -m consumers learn checkpoint verify` with these settings, as far as its exit code."""
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        del os.environ[name]
    os.environ["HEADRACE_HOME"] = str(home)
    os.environ["HEADRACE_DATABASE_URL"] = database_url
    os.environ["HEADRACE_WORKER_ID"] = worker
    os.environ["HEADRACE_FAILPOINT"] = failpoint
    log = (home / "logs" / f"{worker}.log").open("ab", buffering=0)
    os.dup2(log.fileno(), sys.stderr.fileno())
    sys.exit(main([*CONSUMERS, "--forever"]))
