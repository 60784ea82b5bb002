"""The registry of all consumers. A consumer is hosted only if it is listed here."""

import importlib
from collections.abc import Sequence

from infra.spine.runtime.consumer import AnyConsumer
from schemas.effects import Lane
from schemas.errors import InvalidConfig

REGISTRY: dict[str, str] = {
    "sync": "consumers.sync.consumer",
    "run": "consumers.run.consumer",
    "rollout": "consumers.rollout.consumer",
    "grade": "consumers.grade",
    "learn": "consumers.learn.consumer",
    "checkpoint": "consumers.checkpoint",
    "evaluate": "consumers.evaluate",
    "verify": "consumers.verify.consumer",
    "regrade": "consumers.regrade.consumer",
    "compare": "consumers.regrade.gradients",
    "deploy": "consumers.deploy.consumer",
    "publish": "consumers.deploy.publish",
    "trigger": "consumers.trigger.consumer",
    "status": "consumers.status",
}
"""Consumer name -> the module that defines it (`CONSUMER`). `project` is a tail, not an intake: it
runs in the control process (`consumers/project/consumer.py`)."""

CONTROL_ONLY = ("trigger", "status")
"""The consumers that only the control process hosts, because only it has their ports: the door for
submissions, and the APIs of forges with their credentials."""

CONTROL_CONSUMERS = ("sync", *CONTROL_ONLY)
"""The consumers that the control process hosts. Other processes may host sync too."""


def load(name: str) -> AnyConsumer:
    """Import and return the consumer called `name`. Raises InvalidConfig for an unknown name."""
    if name not in REGISTRY:
        raise InvalidConfig(f"there is no consumer {name!r}; there are: {', '.join(REGISTRY)}")
    consumer: AnyConsumer = importlib.import_module(REGISTRY[name]).CONSUMER
    return consumer


def lanes_of(consumers: Sequence[AnyConsumer]) -> tuple[Lane, ...]:
    """Return the lanes of all effects that these consumers perform."""
    lanes = {effect.lane for consumer in consumers for effect in consumer.effects}
    return tuple(lane for lane in Lane if lane in lanes)
