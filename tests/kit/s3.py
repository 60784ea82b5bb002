"""An S3 store for the tests: the one that HEADRACE_TEST_S3 names, else one built and started here.

HEADRACE_TEST_S3 is `http://ACCESS:SECRET@host:port`; each test makes a bucket of its own there. Without
an address and without the means to build a store the tests are skipped, but never in CI.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import pytest

from infra.s3 import S3Blobs
from infra.s3_place import S3Place
from infra.s3_store import Keys, S3Store
from infra.stack.s3 import S3Server, binary, s3_server
from schemas.errors import InvalidConfig

ADDRESS = "HEADRACE_TEST_S3"


def given(address: str) -> S3Server:
    """The store at `http://ACCESS:SECRET@host:port`."""
    parts = urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    assert parts.username, f"{ADDRESS} holds no access key: http://ACCESS:SECRET@host:port"
    assert parts.password, f"{ADDRESS} holds no secret key: http://ACCESS:SECRET@host:port"
    access, secret = unquote(parts.username), unquote(parts.password)
    return S3Server(f"{parts.scheme}://{host}", access, secret)


def needed() -> None:
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
        yield given(address)
        return
    needed()
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@dataclass(frozen=True)
class Bucket:
    """A bucket of one test's own."""

    server: S3Server
    name: str

    def store(
        self,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        patience_s: float = 20.0,
        read_s: float = 10.0,
    ) -> S3Store:
        """The bucket, spoken to at `endpoint` (default: the store's own)."""
        return S3Store(
            S3Place(self.name, prefix),
            endpoint=endpoint or self.server.endpoint,
            keys=Keys(self.server.access_key, self.server.secret_key),
            patience_s=patience_s,
            read_s=read_s,
        )

    def blobs(self, prefix: str = "", **changes: object) -> S3Blobs:
        return S3Blobs(self.store(prefix, **changes))  # type: ignore[arg-type]

    def contents(self) -> dict[str, bytes]:
        """Every object, read past our own adapter."""
        client = self.store().client
        found = client.list_objects_v2(Bucket=self.name).get("Contents", ())
        keys = [entry["Key"] for entry in found]
        return {k: client.get_object(Bucket=self.name, Key=k)["Body"].read() for k in keys}


@pytest.fixture
def bucket(s3: S3Server) -> Iterator[Bucket]:
    made = Bucket(s3, f"t-{uuid4().hex[:16]}")
    client = made.store().client
    client.create_bucket(Bucket=made.name)
    yield made
    for key in made.contents():
        client.delete_object(Bucket=made.name, Key=key)
    client.delete_bucket(Bucket=made.name)


def data_of(server: Path) -> Path:
    """Where a store that `s3_server` runs over a directory keeps its buckets."""
    return server / "buckets"
