"""A worker has every port that its consumers name, and says which one it lacks."""

from dataclasses import fields

import pytest

from consumers.process.ports import port_names, ports_from
from consumers.registry import REGISTRY, lanes_of, load
from infra.blobs.artifacts import ArtifactStore
from infra.blobs.memory import MemoryBlobs
from infra.spine.memory.event_log import MemoryLog, World
from infra.spine.runtime.hosting import Hosting
from schemas.effects import Lane
from schemas.ids import WorkerId
from tests.kit.ports import AllPorts

KNOWN = {field.name for field in fields(AllPorts)}


@pytest.mark.parametrize("name", REGISTRY)
def test_a_consumer_names_known_ports_or_none(name: str) -> None:
    consumer = load(name)
    assert (consumer.perform is None) == (consumer.ports is None) == (not consumer.effects)
    names = {field.name for field in fields(consumer.ports)} if consumer.ports else set()
    assert names <= KNOWN, "no process opens it: correct the name, or open it in open_ports"


def test_a_process_needs_the_ports_of_the_lanes_that_it_serves() -> None:
    consumers = tuple(map(load, REGISTRY))
    hosting = Hosting(WorkerId("w"), consumers, lanes_of(consumers))
    assert port_names(hosting) == KNOWN
    user = port_names(Hosting(WorkerId("w"), consumers, (Lane.USER,)))
    judged = {"judges", "judgements", "teachers"}
    assert user == {"artifacts", "datasets", "log", "user", "secrets", *judged}
    assert port_names(Hosting(WorkerId("w"), (load("run"),), ())) == frozenset()


def test_a_missing_port_is_named_with_its_consumer() -> None:
    artifacts = ArtifactStore(MemoryLog(World()), MemoryBlobs())
    build = ports_from({"user": object()})
    with pytest.raises(RuntimeError, match=r"no port repositories, which sync names"):
        build(load("sync"), artifacts)
