"""`python -m consumers NAME... [--lanes LANE...] [--drain | --forever]`: a process that hosts
consumers. The registry below is explicit: a consumer exists once it stands here. `relay` is the other
thing that a container may be: it publishes the log to Kafka, and hosts nothing.

This is a composition root: the only place under consumers/ that may import trainer, and it does so
lazily, when this process takes the lanes of a device.
"""

import argparse
import asyncio
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from infra.runtime.consumer import Consumer
from infra.settings.settings import BadSetting
from schemas.effects import Lane
from schemas.errors import InvalidConfig

REGISTRY: dict[str, str] = {
    "sync": "consumers.sync",
    "run": "consumers.run",
    "rollout": "consumers.rollout",
    "grade": "consumers.grade",
    "learn": "consumers.learn",
    "checkpoint": "consumers.checkpoint",
    "evaluate": "consumers.evaluate",
    "verify": "consumers.verify",
}
"""Consumer name -> the module that defines it (`CONSUMER`). `project` is a tail, not an intake: it
runs in the control process (`consumers/project.py`)."""


RELAY = "relay"


def load(name: str) -> Consumer[Any]:
    """The consumer called `name`. Raises InvalidConfig for an unknown name."""
    if name not in REGISTRY:
        raise InvalidConfig(f"there is no consumer {name!r}; there are: {', '.join(REGISTRY)}")
    consumer: Consumer[Any] = importlib.import_module(REGISTRY[name]).CONSUMER
    return consumer


def lanes_of(consumers: Sequence[Consumer[Any]]) -> tuple[Lane, ...]:
    """The lanes of all effects that these consumers perform."""
    lanes = {effect.lane for consumer in consumers for effect in consumer.effects}
    return tuple(lane for lane in Lane if lane in lanes)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m consumers", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help=", ".join((*REGISTRY, RELAY)))
    parser.add_argument("--lanes", nargs="+", type=Lane, choices=list(Lane), default=None)
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--drain", action="store_true", help="exit when nothing is left to do")
    ends.add_argument("--forever", action="store_true", help="the default")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Host the named consumers. Exit codes: 0 done or stopped, 1 refused, 2 usage, 3 lease lost."""
    asked = arguments(sys.argv[1:] if argv is None else argv)
    if unknown := set(asked.names) - {*REGISTRY, RELAY}:
        sys.stderr.write(
            f"there is no consumer {unknown.pop()!r}; there are: {', '.join(REGISTRY)}\n"
        )
        return 2
    if RELAY in asked.names and len(asked.names) > 1:
        sys.stderr.write("the relay has a process of its own: name it alone\n")
        return 2
    from consumers.worker import relay, work

    try:
        if asked.names == [RELAY]:
            return asyncio.run(relay(tuple(REGISTRY)))
        consumers = tuple(load(name) for name in dict.fromkeys(asked.names))
        lanes = tuple(asked.lanes) if asked.lanes else lanes_of(consumers)
        return asyncio.run(work(consumers, lanes=lanes, drain=asked.drain))
    except (InvalidConfig, BadSetting) as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
