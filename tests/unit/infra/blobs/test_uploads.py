"""The plan of the parts of an upload."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.blobs.uploads import (
    MAX_BYTES,
    MOST_PARTS,
    PART_BYTES,
    WHOLE_BYTES,
    Upload,
    check_size,
    part_bytes,
)
from schemas.errors import InvalidConfig, NotFound

EDGES = [
    1,
    WHOLE_BYTES - 1,
    WHOLE_BYTES,
    WHOLE_BYTES + 1,
    MAX_BYTES - 1,
    MAX_BYTES,
    MOST_PARTS * PART_BYTES,
    MOST_PARTS * PART_BYTES + 1,
]
sizes = st.one_of(st.sampled_from(EDGES), st.integers(1, MAX_BYTES), st.integers(1, 5 << 40))


def upload(size: int) -> Upload:
    now = datetime.now(UTC)
    return Upload("u", "dataset", size, part_bytes(size), "open", "{}", None, None, now)


@pytest.mark.hypothesis
@given(sizes)
def test_parts_cover_a_file_exactly_within_their_bounds(size: int) -> None:
    """S3 takes parts of 5 MiB to 5 GiB, but the last one may be smaller. So do we, and it holds for
    files far above the largest one that is accepted now."""
    of = upload(size)
    parts = [of.bytes_of(number) for number in range(1, of.num_parts + 1)]
    assert sum(parts) == size
    assert 1 <= len(parts) <= MOST_PARTS
    assert set(parts[:-1]) <= {of.part_size}
    assert 1 <= parts[-1] <= of.part_size
    assert len(parts) == 1 or PART_BYTES <= of.part_size <= 5 << 30
    assert (len(parts) == 1) == (size <= WHOLE_BYTES)
    for absent in (0, -1, of.num_parts + 1):
        with pytest.raises(NotFound):
            of.bytes_of(absent)


@pytest.mark.parametrize("size", [0, -1, MAX_BYTES + 1])
def test_a_size_that_no_file_may_have_is_refused_before_any_byte(size: int) -> None:
    with pytest.raises(InvalidConfig, match="must be from 1 byte to 5 GiB"):
        check_size(size)
