"""Fixtures that several folders use."""

import gc
from collections.abc import Iterator

import pytest

from infra.operations.local import gc_freeze
from tests.kit import kill_sample, property_examples
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

pytest.register_assert_rewrite("tests.crash.scenarios")
property_examples.load()
gc.disable()  # until all tests are imported


def pytest_collection_finish(session: pytest.Session) -> None:
    """Do once what a test would be timed for. Let the collector work while tests run, but not search
    torch and 8,000 tests each time."""
    if any(item.get_closest_marker("hypothesis") for item in session.items):
        property_examples.prepare()
    gc_freeze.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kill_sample.leave_out(config, items)


def pytest_report_header(config: pytest.Config) -> str:
    return kill_sample.describe(config)


@pytest.fixture(scope="module", autouse=True)
def _homes_are_forgotten() -> Iterator[None]:
    yield
    forget_homes()
