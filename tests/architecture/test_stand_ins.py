"""Stand-ins of tests take what their ports take: a port that changes changes them too."""

import inspect
from typing import Any

import pytest

from infra.blobs.memory import MemoryBlobs
from infra.ports.services import Blobs, Gateway, Repositories, Session, UserCode
from infra.spine.memory.bus import MemoryBus
from infra.spine.memory.event_log import MemoryEffects, MemoryLog
from infra.spine.ports.bus import Bus
from infra.spine.ports.clock import Clock, ManualClock
from infra.spine.ports.effects import Effects
from infra.spine.ports.event_log import EventLog
from schemas.learner import Learner
from schemas.sampling import Sampler
from tests.kit.fakes import (
    FakeGateway,
    FakeLearner,
    FakeRepositories,
    FakeSampler,
    FakeSession,
    FakeUserCode,
)
from tests.kit.random_latency import RandomLatencyLearner, RandomLatencySampler

STAND_INS = [
    (FakeGateway, Gateway),
    (FakeLearner, Learner),
    (FakeRepositories, Repositories),
    (FakeSampler, Sampler),
    (FakeSession, Session),
    (FakeUserCode, UserCode),
    (ManualClock, Clock),
    (MemoryBlobs, Blobs),
    (MemoryBus, Bus),
    (MemoryEffects, Effects),
    (MemoryLog, EventLog),
    (RandomLatencyLearner, Learner),
    (RandomLatencySampler, Sampler),
]


def asked(port: type[Any]) -> dict[str, Any]:
    """The methods of a port and of the protocols that it consists of, by name."""
    return {
        name: value
        for part in port.__mro__
        for name, value in vars(part).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


def taken(method: Any) -> list[tuple[str, Any, bool]]:
    """Name and kind of each parameter, and whether it may be left out."""
    parameters = inspect.signature(method).parameters.values()
    return [(p.name, p.kind, p.default is not p.empty) for p in parameters]


@pytest.mark.parametrize(("stand_in", "port"), STAND_INS, ids=lambda kind: kind.__name__)
def test_a_stand_in_takes_what_its_port_takes(stand_in: type[Any], port: type[Any]) -> None:
    methods = asked(port)
    assert methods
    for name, method in methods.items():
        own = getattr(stand_in, name)
        assert taken(own) == taken(method), name
        assert inspect.iscoroutinefunction(own) == inspect.iscoroutinefunction(method), name
