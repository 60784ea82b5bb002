"""The arithmetic of S3: names of keys, sizes of parts, pauses between retries."""

from hashlib import sha256
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.blobs.s3.client import FIRST_PAUSE_S, LONGEST_PAUSE_S, pauses
from infra.blobs.s3.multipart import MOST_PARTS, PART_BYTES, UploadSource, part_bytes
from infra.settings.s3 import S3Place
from schemas.errors import NotFound


@given(size=st.integers(min_value=1, max_value=5 << 40))
def test_any_size_fits_into_the_parts_that_s3_allows(size: int) -> None:
    part = part_bytes(size)
    assert part >= PART_BYTES
    assert -(-size // part) <= MOST_PARTS


def test_pauses_double_up_to_a_bound_and_are_shortened_by_chance() -> None:
    drawn = list(islice(pauses(), 20))
    assert FIRST_PAUSE_S / 2 <= drawn[0] <= FIRST_PAUSE_S
    assert all(LONGEST_PAUSE_S / 2 <= pause <= LONGEST_PAUSE_S for pause in drawn[8:])
    assert all(later <= 4 * earlier for earlier, later in pairwise(drawn))
    assert drawn != list(islice(pauses(), 20))


def test_a_place_names_keys_and_uris_both_ways() -> None:
    for text, key in (("s3://bucket", "a/b"), ("s3://bucket/p/q", "p/q/a/b")):
        place = S3Place.parse(text)
        assert str(place) == text
        assert place.object_key("a/b") == key
        assert place.uri("a/b") == f"s3://bucket/{key}"
        assert place.object_key_of(place.uri("a/b")) == key
        assert place.key(key) == "a/b"


@pytest.mark.parametrize(
    "uri", ["s3://bucket/q/x", "s3://bucket/px", "s3://bucket2/p/x", "file:///p/x", "p/x", ""]
)
def test_a_uri_of_another_place_is_not_ours(uri: str) -> None:
    with pytest.raises(NotFound, match="is not in s3://bucket/p"):
        S3Place("bucket", "p").object_key_of(uri)


@pytest.mark.parametrize(
    "text", ["s3:/b/c", "s3://ab", "s3://bucket/..", "s3://bucket/a/./b", "s3://bucket\n", "bucket"]
)
def test_an_address_that_is_not_a_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        S3Place.parse(text)


def test_a_source_gives_the_same_pieces_from_memory_and_from_a_file(tmp_path: Path) -> None:
    data = bytes(range(200)) * 100
    path = tmp_path / "source"
    path.write_bytes(data)
    memory, file = UploadSource.of_bytes(data, sha256(data).hexdigest()), UploadSource.of_file(path)
    assert (memory.size, memory.sha256) == (file.size, file.sha256)
    for start in (0, 7, len(data) - 3):
        assert memory.read(start, 999) == file.read(start, 999) == data[start : start + 999]
