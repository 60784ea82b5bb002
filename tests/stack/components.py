"""The real components of a cluster on this machine, without Docker: PostgreSQL, Kafka and an S3 store,
each of them started from what the machine has, on free ports, below one directory."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.operations.local.data_directory import ensure_directory
from tests.stack.kafka import KafkaServer, kafka_server
from tests.stack.postgres import PostgresServer
from tests.stack.s3 import S3Server, s3_server

BUCKET = "headrace"


@dataclass(frozen=True, slots=True)
class Components:
    """Running components. `environment` is what Headrace must be told to work on them."""

    postgres: PostgresServer
    kafka: KafkaServer
    s3: S3Server

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HEADRACE_DATABASE_URL": self.postgres.url,
            **self.kafka.environment,
            "HEADRACE_BLOBS": f"s3://{BUCKET}/blobs",
            **self.s3.environment,
        }


@contextmanager
def components(
    directory: Path, kafka_users: Mapping[str, str] | None = None
) -> Iterator[Components]:
    """All of them, while inside. Only `kafka_users` (name -> password) can log in to Kafka. Without them
    it is open to all. Raises InvalidConfig when one is not to be had here, TransientError when one does
    not start."""
    with ExitStack() as stack:
        postgres = stack.enter_context(_postgres(directory))
        kafka = stack.enter_context(kafka_server(directory / "kafka", users=kafka_users))
        s3 = stack.enter_context(s3_server(directory / "s3", users=True))
        make_bucket(s3)
        yield Components(postgres, kafka, s3)


@contextmanager
def _postgres(directory: Path) -> Iterator[PostgresServer]:
    """The stack's database. As root it lives outside of `directory`, which the unprivileged user that
    must run it may not be able to reach."""
    place = directory / "postgres"
    server = PostgresServer(ensure_directory(place) if os.geteuid() == 0 else place)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def make_bucket(server: S3Server) -> None:
    """The bucket `headrace` of a store, unless it has one."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
    )
    if BUCKET not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
        client.create_bucket(Bucket=BUCKET)
