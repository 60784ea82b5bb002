"""A real S3 store keeps the contract of blobs; and says clearly when it cannot."""

import pytest

from infra.s3 import S3Blobs
from tests.contracts.blobs_suite import BlobsSuite
from tests.kit.s3 import Bucket

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
