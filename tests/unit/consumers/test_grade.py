"""grade: every group is graded once, and every sample of it has a grade."""

import pytest

from consumers.grade import CONSUMER, NO_SAMPLES
from schemas.errors import FailureCategory
from schemas.events import GroupGenerated, GroupGraded
from schemas.ids import grade_stream
from schemas.messages import Failed, GradeGroup, GroupScored
from schemas.sampling import ArtifactRef, Grade, SampleFailure
from tests.kit.decider import given
from tests.kit.specs import entry, group_spec, ref, template

SPEC = group_spec(template())
STREAM = grade_stream(SPEC.group)
ENTRIES = (entry(0), entry(1))
GENERATED = GroupGenerated(spec=SPEC, entries=ENTRIES, parts=(ref("group"),))
EFFECT = GradeGroup(spec=SPEC, parts=(ref("group"),), entries=ENTRIES)
GRADES = (Grade(index=0, reward=1.0), Grade(index=1, reward=0.5))
SCORED = GroupScored(EFFECT, group_artifact=ref("group"), grades=GRADES)
GRADED = GroupGraded(spec=SPEC, artifact=ref("group"), entries=ENTRIES, grades=GRADES)


def test_a_generated_group_is_graded() -> None:
    given(CONSUMER).when(GENERATED).then(effects=[EFFECT])


def test_a_graded_group_is_not_graded_again() -> None:
    given(CONSUMER, GRADED).when(GENERATED).then_nothing()


def test_the_scores_are_recorded_once() -> None:
    given(CONSUMER).when(SCORED, stream=STREAM).then(events=[GRADED])
    given(CONSUMER, GRADED).when(SCORED, stream=STREAM).then_nothing()


@pytest.mark.parametrize(
    ("parts", "artifact"),
    [((ref("group"),), ref("group")), ((ref("p0"), ref("p1")), ref("p0")), ((), NO_SAMPLES)],
)
def test_a_grading_that_is_given_up_leaves_every_reward_out(
    parts: tuple[ArtifactRef, ...], artifact: ArtifactRef
) -> None:
    effect = EFFECT.model_copy(update={"parts": parts})
    failed = Failed(effect, FailureCategory.CRASH, "died 20 times")
    failure = SampleFailure(category=FailureCategory.CRASH, message="died 20 times")
    grades = tuple(Grade(index=index, reward=None, failure=failure) for index in (0, 1))
    graded = GroupGraded(spec=SPEC, artifact=artifact, entries=ENTRIES, grades=grades)
    given(CONSUMER).when(failed, stream=STREAM).then(events=[graded])
    given(CONSUMER, GRADED).when(failed, stream=STREAM).then_nothing()
