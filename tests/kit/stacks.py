"""What a platform of a test runs on: the embedded default, or the real components.

The real ones are shared by a test session; each platform has a place of its own there: a database, a
prefix of topics and groups, a prefix in a bucket. `on_every_stack` makes a fixture run on both.
"""

import asyncio
from dataclasses import dataclass
from uuid import uuid4

import pytest

from tests.kit.kafka import environment as kafka_environment
from tests.kit.postgres import database_of, execute
from tests.stack.components import BUCKET, Components, make_bucket
from tests.stack.s3 import S3Server


@dataclass(frozen=True, slots=True)
class RealStack:
    """Running components: the URL of a server's superuser, a broker's address, a store with a bucket."""

    database: str
    kafka: str
    s3: S3Server

    @classmethod
    def of(cls, components: Components) -> "RealStack":
        return cls(components.postgres.url, components.kafka.bootstrap, components.s3)

    def fresh_settings(self) -> dict[str, str]:
        """The settings of a new platform on these components that shares no names with any other."""
        name = f"t{uuid4().hex[:12]}"
        asyncio.run(execute(self.database, f"create database {name}"))
        return {
            "HEADRACE_DATABASE_URL": database_of(self.database, name),
            **kafka_environment(self.kafka, prefix=f"{name}."),
            "HEADRACE_BLOBS": f"s3://{BUCKET}/{name}",
            **self.s3.environment,
        }


def stack_settings(request: pytest.FixtureRequest, stack: str | None = None) -> dict[str, str]:
    """The settings of a platform on `stack`, or on the one that a fixture was asked for."""
    if (stack or request.param) == "embedded":
        return {}
    real: RealStack = request.getfixturevalue("real_stack")
    return real.fresh_settings()


on_every_stack = [
    pytest.param("embedded", id="embedded"),
    pytest.param("real", id="real", marks=(pytest.mark.kafka, pytest.mark.s3)),
]


@pytest.fixture(scope="session")
def real_stack(server_url: str, kafka_address: str, s3: S3Server) -> RealStack:
    """PostgreSQL server, Kafka and S3 store of this session."""
    make_bucket(s3)
    return RealStack(server_url, kafka_address, s3)
