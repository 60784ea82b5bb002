"""The excerpt of a user's error fits into an event, in whatever language the error is written."""

import pytest

from infra.spine.runtime.error_excerpt import excerpt
from schemas.artifact_refs import ArtifactRef
from schemas.events import MAX_EVENT_BYTES, GroupGenerated
from schemas.limits import most_samples
from schemas.specs import SampleEntry
from tests.kit.specs import group_spec, template

MOST = most_samples(())


@pytest.mark.parametrize("character", ["x", '"', "\\", "é", "漢", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("num", [1, 8, MOST])
def test_a_group_of_which_every_sample_failed_fits(character: str, num: int) -> None:
    message = excerpt(character * 10_000, num_samples=num)
    assert message.endswith("…")
    entries = tuple(SampleEntry(index=n, failure="user", message=message) for n in range(num))
    part = ArtifactRef(uri="row:" + "0" * 64, sha256="0" * 64, size=1)
    event = GroupGenerated(
        spec=group_spec(template(num_samples=num)), entries=entries, parts=(part,) * num
    )
    assert len(event.model_dump_json().encode()) <= MAX_EVENT_BYTES


def test_short_text_is_unchanged() -> None:
    assert excerpt(" 値が 3 より大きい ") == "値が 3 より大きい"
    assert excerpt("a\0b\ud800c") == "a?b?c"
