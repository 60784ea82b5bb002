"""The regrade of the showcase: one group of the finished run, with a disagreement and a sample without a
new reward."""

from typing import Any

from schemas.errors import FailureCategory
from schemas.events import (
    GradientComparisonCompleted,
    GradientsCompared,
    RegradeCompleted,
    RegradePartGraded,
    RegradeRequested,
    RegradeStarted,
    UngradedSample,
)
from schemas.events.regrades.figures import Disagreement, report_of, sums_of
from schemas.events.regrades.groups import RegradedGroup, RegradedGroups
from schemas.ids import GroupKey, Purpose
from schemas.sampling import Grade, SampleFailure
from tests.kit.application import Application
from tests.kit.showcase_answers import NUM_SAMPLES, Texts
from tests.kit.specs import config, rollout_ref

REGRADE = "0123456789abcdef"


async def fill_regrade(app: Application, run: str, text: Texts) -> None:
    """Append a regrade of the first group of step 2."""
    group = str(GroupKey(run, Purpose.TRAIN, 2, 0))
    before = tuple(Grade(index=i, reward=float(i % 2)) for i in range(NUM_SAMPLES))
    failure = SampleFailure(category=FailureCategory.GRADER, message=text("KeyError: 'unit'"))
    after = (
        Grade(index=0, reward=None, failure=failure),
        *(Grade(index=i, reward=0.25) for i in range(1, NUM_SAMPLES)),
    )
    content = RegradedGroups(
        groups=(RegradedGroup(group=group, step=2, before=before, after=after),)
    )
    data = content.model_dump_json().encode()
    artifact = await app.services.artifacts.put_artifact(data, run=run, blob=True)
    sums = sums_of([g.reward for g in before], [g.reward for g in after], threshold=1.0)
    worst = (Disagreement(sample=f"{group}.1", step=2, before=1.0, after=0.25),)
    ungraded = (
        UngradedSample(
            sample=f"{group}.0",
            step=2,
            before=0.0,
            category=str(failure.category),
            message=failure.message,
        ),
    )
    rollout, failures = rollout_ref(), {str(failure.category): 1}
    shared: dict[str, Any] = {"regrade": REGRADE, "run": run}
    asked = RegradeRequested(
        **shared,
        source="commit",
        rollout=rollout,
        config=config(),
        workspace="ws-sums",
        commit=text("stricter-grader"),
        weights={text("length"): 0.5},
        gradients=True,
        requester=text("ada"),
    )
    await app.append(
        [
            asked,
            RegradeStarted(**shared, rollout=rollout),
            RegradePartGraded(**shared, number=1, artifact=artifact, by_step={2: sums}),
            RegradeCompleted(
                **shared,
                status="finished",
                report=report_of(sums),
                worst=worst,
                ungraded=ungraded,
                failures=failures,
                parts=1,
                seconds=0.4,
                gradients=True,
            ),
            GradientsCompared(
                **shared,
                step=2,
                cosine=0.73,
                norm_before=0.4,
                norm_after=0.3,
                advantages=7,
                turned=2,
                groups=1,
                missing=1,
            ),
            GradientComparisonCompleted(**shared, steps=1),
        ]
    )
