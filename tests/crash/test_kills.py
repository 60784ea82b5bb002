"""kill -9 in the middle of what users do: each result is that of an undisturbed twin, nothing is lost or
done twice, and every armed point kills a process. `tests/crash/scenarios` holds the scenarios."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.crash.scenarios import (
    adapters,
    control,
    curriculum,
    deploy,
    distillation,
    evaluation,
    fork,
    formats,
    given_secrets,
    hub,
    judge,
    objectives,
    package,
    preferences,
    prefixes,
    push,
    regrade,
    reward_model,
    rollout_server,
    teacher_server,
    vllm,
    webhook,
)
from tests.kit.kills import Points, Stage, check_fired

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

Act = Callable[..., object]
"""It takes a stage and the fixtures, checks what must hold, and returns what its twin returns too."""


class Scenario(NamedTuple):
    """With `has_twin` it is done without kills too, otherwise it compares by itself. A scenario without
    points kills processes by itself."""

    name: str
    act: Act
    points: Points = {}
    has_twin: bool = False
    fixtures: Sequence[str] = ()
    marks: Sequence[pytest.MarkDecorator] = ()


SCENARIOS = (
    Scenario("adapters", adapters.act, adapters.POINTS, has_twin=True),
    Scenario("control", control.act),
    Scenario("curriculum", curriculum.act, curriculum.POINTS, has_twin=True),
    Scenario("deploy", deploy.act, deploy.POINTS),
    Scenario("distillation", distillation.act, distillation.POINTS, has_twin=True),
    Scenario("evaluation", evaluation.act, evaluation.POINTS),
    Scenario("fork", fork.act, fork.POINTS),
    Scenario("formats", formats.act, formats.POINTS, has_twin=True),
    Scenario("given_secrets", given_secrets.act, given_secrets.POINTS, has_twin=True),
    Scenario("hub", hub.act, hub.POINTS),
    Scenario("judge", judge.act, judge.POINTS),
    Scenario("objectives", objectives.act, objectives.POINTS, has_twin=True),
    Scenario("package", package.act, package.POINTS, has_twin=True),
    Scenario("preferences", preferences.act, preferences.POINTS, has_twin=True),
    Scenario("prefixes", prefixes.act, prefixes.POINTS, has_twin=True),
    Scenario("reward_model", preferences.act_reward_model, preferences.POINTS, has_twin=True),
    Scenario("reward_model-pays", reward_model.act, reward_model.POINTS, has_twin=True),
    Scenario("push-submit", push.act, push.SUBMIT, has_twin=True),
    Scenario("push-trigger-intake", push.act, push.TRIGGER_INTAKE, has_twin=True),
    Scenario("push-trigger-perform", push.act, push.TRIGGER_PERFORM, has_twin=True),
    Scenario("push-status", push.act, push.STATUS, has_twin=True),
    Scenario("regrade", regrade.act, regrade.POINTS),
    Scenario("rollout_server", rollout_server.act),
    Scenario("teacher_server", teacher_server.act, teacher_server.POINTS, has_twin=True),
    Scenario("vllm-forced", vllm.act_forced, vllm.POINTS, has_twin=True),
    Scenario("vllm-full", vllm.act_full, vllm.POINTS, has_twin=True),
    Scenario(
        "webhook",
        webhook.act,
        webhook.POINTS,
        fixtures=("gitea",),
        marks=(pytest.mark.gitea, pytest.mark.slow),
    ),
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Act:
    """Returns the result of a scenario that nobody disturbs, which is done once."""
    return cache(lambda act: act(Stage(tmp_path_factory.mktemp("calm"), {})))


@pytest.mark.parametrize("scenario", [pytest.param(s, id=s.name, marks=s.marks) for s in SCENARIOS])
def test_kills_change_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: Act, scenario: Scenario
) -> None:
    expected = undisturbed(scenario.act) if scenario.has_twin else None
    stage = Stage(tmp_path, scenario.points)
    result = scenario.act(stage, *map(request.getfixturevalue, scenario.fixtures))
    check_fired(stage.home, scenario.points)
    assert result == expected
