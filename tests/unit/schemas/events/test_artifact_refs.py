"""The artifacts that an event names, and which of them may be missing."""

from uuid import UUID

import pytest

from schemas.events import GroupsRequested, PolicyUpdated, SampleGenerated
from schemas.events.artifact_refs import collectable, references
from schemas.ids import Purpose
from schemas.sampling import PolicyRef
from schemas.specs import Slot
from tests.kit.specs import DATASET, entry, group_spec, ref, template, version


def test_a_request_needs_its_dataset_and_only_says_what_it_samples_with() -> None:
    policy = PolicyRef(version=3, weights=ref("w3"))
    asked = GroupsRequested(
        owner="r1",
        purpose=Purpose.TRAIN,
        step=4,
        slots=(Slot(slot=0, row=0),),
        template=template().model_copy(update={"policy": policy}),
    )
    assert {found.uri for found in references(asked)} >= {DATASET.content.uri, ref("w3").uri}
    assert collectable(asked) == {ref("w3").uri}


def test_a_sample_needs_the_files_of_its_user_code() -> None:
    spec = group_spec(template(workflow="Say"))
    made = SampleGenerated(spec=spec, entry=entry(0), files=(ref("a file"),))
    assert ref("a file").uri in {found.uri for found in references(made)}
    assert ref("a file").uri not in collectable(made)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_version_may_be_gone_unless_something_needs_it(pinned: bool) -> None:
    made = PolicyUpdated(
        run="r1",
        step=3,
        state=version(3),
        batch=UUID(int=9),
        metrics={},
        plan=(),
        versions={},
        pinned=pinned,
    )
    named = {found.uri for found in references(made)}
    assert named == {ref("w3").uri, ref("s3").uri}
    assert collectable(made) == (frozenset() if pinned else named)
