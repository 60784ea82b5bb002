"""A Kafka for the tests: the one that HEADRACE_TEST_KAFKA names, else one of our own, else a skip.

Every test has topics and groups of its own (a prefix), so tests share a broker and nothing else. A test
that kills or wipes the broker takes `kafka_node`, and leaves it running.
"""

import os
from collections.abc import Iterator
from uuid import uuid4

import pytest

from infra.settings.kafka import KafkaSettings
from tests.stack.kafka import KafkaServer, kafka_server, missing

GIVEN = "HEADRACE_TEST_KAFKA"


@pytest.fixture(scope="session")
def kafka_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A broker that this session started. Tests may stop or wipe it."""
    need_kafka()
    with kafka_server(tmp_path_factory.mktemp("kafka"), with_security=True) as server:
        yield server


def need_kafka() -> None:
    """Skip the test when no broker can be started here; fail it in CI."""
    if lacks := missing():
        reason = f"no Kafka of our own without {lacks}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def kafka_address(request: pytest.FixtureRequest) -> str:
    """The addresses of the bootstrap servers."""
    if given := os.environ.get(GIVEN):
        return given
    node: KafkaServer = request.getfixturevalue("kafka_node")
    return node.bootstrap


@pytest.fixture
def kafka(kafka_address: str) -> KafkaSettings:
    """Settings of this test's own part of the broker."""
    return settings(kafka_address)


def settings(address: str) -> KafkaSettings:
    """Settings with a fresh prefix."""
    loaded = KafkaSettings.load(environment(address))
    assert loaded is not None
    return loaded


def environment(address: str, *, prefix: str | None = None) -> dict[str, str]:
    """The variables that name this broker and a fresh prefix on it."""
    return {
        "HEADRACE_KAFKA": address,
        "HEADRACE_KAFKA_PREFIX": prefix or f"t{uuid4().hex[:12]}.",
        "HEADRACE_KAFKA_PARTITIONS": "3",
    }


def variables(kafka: KafkaSettings) -> dict[str, str]:
    """The variables under which a process uses these settings."""
    return environment(kafka.address, prefix=kafka.prefix)
