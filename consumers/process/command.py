"""`python -m consumers NAME... [--lanes LANE...] [--drain | --forever]`: starts a process that hosts
the named consumers (`consumers/registry.py` lists them). The name `relay` starts a process that
publishes the log to Kafka and hosts no consumer.

The engine is imported only by a process that takes the lanes of a device
(`consumers/process/worker.py`).
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from consumers.registry import CONTROL_ONLY, REGISTRY, lanes_of, load
from infra.operations.local.child import AWAY
from infra.sandbox.service.self_protection import hide_memory
from infra.settings.settings import BadSetting
from schemas.effects import Lane
from schemas.errors import InvalidConfig, TransientError

RELAY = "relay"
HOSTABLE = (*(name for name in REGISTRY if name not in CONTROL_ONLY), RELAY)
"""The names that this command takes."""


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m consumers", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help=", ".join(HOSTABLE))
    parser.add_argument("--lanes", nargs="+", type=Lane, choices=list(Lane), default=None)
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--drain", action="store_true", help="exit when nothing is left to do")
    ends.add_argument("--forever", action="store_true", help="the default")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Host the named consumers. Exit codes: 0 done or stopped, 1 refused, 2 usage, 3 lease lost, and 75
    when the database, or something else that it needs, does not answer."""
    options = arguments(sys.argv[1:] if argv is None else argv)
    if unknown := set(options.names) - {*REGISTRY, RELAY}:
        sys.stderr.write(
            f"there is no consumer {unknown.pop()!r}; there are: {', '.join(HOSTABLE)}\n"
        )
        return 2
    if inside := [name for name in options.names if name in CONTROL_ONLY]:
        sys.stderr.write(
            f"{inside[0]} runs only in the control process (python -m producers.serve), which has the "
            f"credentials of forges; leave out {inside[0]}\n"
        )
        return 2
    if RELAY in options.names and len(options.names) > 1:
        sys.stderr.write("relay cannot share a process with consumers; start it alone\n")
        return 2
    from consumers.process.worker import relay, work

    hide_memory()
    try:
        if options.names == [RELAY]:
            return asyncio.run(relay(tuple(REGISTRY)))
        consumers = tuple(load(name) for name in dict.fromkeys(options.names))
        lanes = tuple(options.lanes) if options.lanes else lanes_of(consumers)
        return asyncio.run(work(consumers, lanes=lanes, drain=options.drain))
    except (InvalidConfig, BadSetting) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except TransientError as error:
        sys.stderr.write(f"{error}\n")
        return AWAY
