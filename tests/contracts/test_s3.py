"""A real S3 store keeps the contract of blobs, and reports clearly when it cannot."""

import pytest

from infra.blobs.s3.store import S3Blobs
from schemas.errors import NotFound
from tests.contracts.blobs_suite import BlobsSuite
from tests.kit.s3 import Bucket, parse_server

pytestmark = pytest.mark.s3


class TestS3(BlobsSuite):
    @pytest.fixture
    def blobs(self, bucket: Bucket) -> S3Blobs:
        return bucket.blobs("some/where")


class TestS3WithoutPrefix(BlobsSuite):
    @pytest.fixture
    def blobs(self, bucket: Bucket) -> S3Blobs:
        return bucket.blobs()


async def test_a_good_store_is_proven_and_left_clean(bucket: Bucket) -> None:
    await bucket.blobs("deep/er").probe()
    assert not bucket.contents()


async def test_foreign_objects_are_read_but_not_listed_if_their_names_are_not_keys(
    bucket: Bucket,
) -> None:
    for key in ("p/of others", "p/ümlaut", "p/plain", "outside"):
        bucket.client.put_object(Bucket=bucket.name, Key=key, Body=b"theirs")
    blobs = bucket.blobs("p")
    assert [blob.key for blob in await blobs.keys("")] == ["plain"]
    assert await blobs.get_blob(f"s3://{bucket.name}/p/plain") == b"theirs"
    with pytest.raises(NotFound):
        await blobs.get_blob(f"s3://{bucket.name}/outside")


async def test_more_keys_than_one_page_are_all_listed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, page = bucket.blobs(), bucket.client.list_objects_v2
    monkeypatch.setattr(blobs._client, "list_objects_v2", lambda **keys: page(**keys, MaxKeys=3))
    names = [f"k/{n}" for n in range(10)]
    for name in names:
        await blobs.put_blob(name, b"x")
    assert [blob.key for blob in await blobs.keys("k/")] == names


def test_an_external_store_is_named_with_its_keys() -> None:
    server = parse_server("https://KEY:se%2Fcret@store.example:9000")
    assert server.endpoint == "https://store.example:9000"
    assert (server.access_key, server.secret_key) == ("KEY", "se/cret")
    with pytest.raises(AssertionError, match="no access key"):
        parse_server("http://store.example")
