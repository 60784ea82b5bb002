"""Fixtures that several folders use."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.kit import kill_sample
from tests.kit.gitea import gitea
from tests.kit.kafka import kafka, kafka_address, kafka_node
from tests.kit.platform import forget_homes
from tests.kit.postgres import (
    database,
    database_url,
    embedded_url,
    own_server,
    postgres_url,
    server_url,
)
from tests.kit.s3 import bucket, s3, s3_client
from tests.kit.stacks import real_stack

__all__ = [
    "bucket",
    "database",
    "database_url",
    "embedded_url",
    "gitea",
    "kafka",
    "kafka_address",
    "kafka_node",
    "own_server",
    "postgres_url",
    "real_stack",
    "s3",
    "s3_client",
    "server_url",
]

# How long an example takes says more about the machine than about the law.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kill_sample.leave_out(config, items)


def pytest_report_header(config: pytest.Config) -> str:
    return kill_sample.describe(config)


@pytest.fixture(scope="module", autouse=True)
def _homes_are_forgotten() -> Iterator[None]:
    yield
    forget_homes()
