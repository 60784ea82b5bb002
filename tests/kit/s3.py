"""An S3 store for the tests: the one that HEADRACE_TEST_S3 names, else one built and started here.

HEADRACE_TEST_S3 is `http://ACCESS:SECRET@host:port`, and each test creates a bucket of its own there. If
there is no address and a store cannot be built, the tests are skipped, but in CI they fail.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import pytest

from infra.blobs.s3.client import Keys, S3Store
from infra.blobs.s3.direct import S3Direct
from infra.blobs.s3.store import S3Blobs
from infra.settings.s3 import S3Place
from schemas.errors import InvalidConfig
from tests.stack.s3 import S3Server, binary, s3_server

ADDRESS = "HEADRACE_TEST_S3"


def parse_server(address: str) -> S3Server:
    """The store at `http://ACCESS:SECRET@host:port`."""
    parts = urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    assert parts.username, f"{ADDRESS} holds no access key: http://ACCESS:SECRET@host:port"
    assert parts.password, f"{ADDRESS} holds no secret key: http://ACCESS:SECRET@host:port"
    access, secret = unquote(parts.username), unquote(parts.password)
    return S3Server(f"{parts.scheme}://{host}", access, secret)


def need_s3() -> None:
    """Skip the test when no store can be built here; fail it in CI."""
    try:
        binary()
    except InvalidConfig as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{error}; or name a store in {ADDRESS}")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running store."""
    if address := os.environ.get(ADDRESS):
        yield parse_server(address)
        return
    need_s3()
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@dataclass
class Bucket:
    """A bucket of one test's own; `client` looks at it past our own adapter."""

    server: S3Server
    client: Any
    name: str
    opened: list[S3Store] = field(default_factory=list)

    def store(
        self,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        patience_s: float = 20.0,
        read_s: float = 10.0,
    ) -> S3Store:
        """The bucket, spoken to at `endpoint` (default: the store's own); closed with the test."""
        store = S3Store(
            S3Place(self.name, prefix),
            endpoint=endpoint or self.server.endpoint,
            keys=Keys(self.server.access_key, self.server.secret_key),
            patience_s=patience_s,
            read_s=read_s,
        )
        self.opened.append(store)
        return store

    def blobs(self, prefix: str = "") -> S3Blobs:
        return S3Blobs(self.store(prefix))

    def public_blobs(self, prefix: str = "") -> S3Blobs:
        """The same, where clients reach the store too."""
        keys = Keys(self.server.access_key, self.server.secret_key)
        store = self.store(prefix)
        direct = S3Direct(store, public_endpoint=self.server.endpoint, keys=keys)
        return S3Blobs(store, direct=direct)

    def contents(self) -> dict[str, bytes]:
        """Key -> content of every object."""
        found = self.client.list_objects_v2(Bucket=self.name).get("Contents", ())
        return {entry["Key"]: self.read(entry["Key"]) for entry in found}

    def read(self, key: str) -> bytes:
        answer = self.client.get_object(Bucket=self.name, Key=key)
        with answer["Body"] as body:
            return bytes(body.read())


@pytest.fixture(scope="session")
def s3_client(s3: S3Server) -> Any:
    """A plain boto3 client."""
    keys = Keys(s3.access_key, s3.secret_key)
    return S3Store(S3Place("none"), endpoint=s3.endpoint, keys=keys).client


@contextmanager
def fresh_bucket(server: S3Server, client: Any) -> Iterator[Bucket]:
    """A new bucket, which is deleted after the block."""
    made = Bucket(server, client, f"t-{uuid4().hex[:16]}")
    client.create_bucket(Bucket=made.name)
    yield made
    for key in made.contents():
        client.delete_object(Bucket=made.name, Key=key)
    client.delete_bucket(Bucket=made.name)
    for store in made.opened:
        store.close()


@pytest.fixture
def bucket(s3: S3Server, s3_client: Any) -> Iterator[Bucket]:
    with fresh_bucket(s3, s3_client) as made:
        yield made
