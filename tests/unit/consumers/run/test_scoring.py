"""How the samples of a run are scored follows from its config and its entry point."""

import json
from typing import Any

import pytest

from consumers.run.settle import metrics, settle
from consumers.run.start import entry_point_problem, scoring_of
from schemas.config import Advanced
from schemas.events import GroupGraded
from schemas.sampling import Grade, JudgeUsage
from schemas.specs import (
    MOST_RUBRIC_BYTES,
    DiscoveredRollout,
    Entrypoint,
    JudgeBudget,
    RewardSpec,
    RubricSpec,
)
from tests.kit.specs import entry, group_spec, ref, template

ENTRY = Entrypoint(rollout="say")
OWN = RubricSpec(name="polite", text="Polite?", model="openai/m", low=1, high=5)
FOUND = DiscoveredRollout(entrypoint=ENTRY, grader="Check", rewards=("exact",), rubrics=(OWN,))
BARE = DiscoveredRollout(entrypoint=ENTRY)
RUBRIC = {"text": "Short?", "model": "openai/m"}


def advanced(**keys: Any) -> Advanced:
    return Advanced.model_validate_json(json.dumps(keys))


def test_a_grader_scores_unless_rewards_are_named() -> None:
    assert scoring_of(FOUND, Advanced()) == {
        "grader": "Check",
        "rewards": (),
        "rubrics": (),
        "judge": None,
    }
    named = scoring_of(FOUND, advanced(rewards=[{"name": "exact", "weight": 2.0}]))
    assert named["grader"] is None
    assert named["rewards"] == (RewardSpec(name="exact", weight=2.0),)


def test_a_rubric_of_the_entry_point_is_named_like_a_reward() -> None:
    found = scoring_of(FOUND, advanced(rewards=[{"name": "polite", "weight": 0.5}]))
    assert found["rewards"] == ()
    assert found["rubrics"] == (OWN.model_copy(update={"weight": 0.5, "asks": True}),)
    assert found["judge"] == JudgeBudget()


def test_rubrics_of_the_config_are_added_to_the_grader() -> None:
    found = scoring_of(FOUND, advanced(rubrics=[RUBRIC, RUBRIC], judge_max_calls=7))
    assert found["grader"] == "Check"
    assert [(r.name, r.asks) for r in found["rubrics"]] == [
        ("rubric_1", False),
        ("rubric_2", False),
    ]
    assert found["judge"] == JudgeBudget(max_calls=7)


def test_rubrics_alone_are_enough() -> None:
    assert entry_point_problem(BARE, ENTRY, advanced(rubrics=[RUBRIC])) is None
    assert "has no Grader" in str(entry_point_problem(BARE, ENTRY, Advanced()))
    unknown = advanced(rewards=[{"name": "rude"}])
    assert "no reward function rude; it has: exact, polite" in str(
        entry_point_problem(FOUND, ENTRY, unknown)
    )


@pytest.mark.parametrize(
    ("length", "samples", "says"),
    [(MOST_RUBRIC_BYTES, 4, f"use at most {MOST_RUBRIC_BYTES} in all"), (9000, 110, "use fewer")],
)
def test_rubrics_must_fit_into_the_events_of_a_group(length: int, samples: int, says: str) -> None:
    large = OWN.model_copy(update={"text": "x" * length})
    found = BARE.model_copy(update={"rubrics": (large,)})
    named = advanced(rewards=[{"name": "polite"}])
    assert says in str(entry_point_problem(found, ENTRY, named, num_samples=samples))
    assert entry_point_problem(FOUND, ENTRY, named, num_samples=samples) is None


def test_the_usage_of_judges_is_a_metric_of_the_step() -> None:
    grades = tuple(Grade(index=n, reward=float(n)) for n in (0, 1))
    graded = GroupGraded(
        spec=group_spec(template()),
        artifact=ref("group"),
        entries=(entry(0), entry(1)),
        grades=grades,
        judgements=ref("judgements"),
        judged=JudgeUsage(calls=3, tokens=40, usd=0.5),
    )
    figures = metrics([settle(graded), settle(graded)], newest=0)
    assert (figures["judge/calls"], figures["judge/tokens"], figures["judge/usd"]) == (6, 80, 1.0)
    plain = graded.model_copy(update={"judged": None})
    assert "judge/calls" not in metrics([settle(plain)], newest=0)
