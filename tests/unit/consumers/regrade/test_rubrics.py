"""A regrade with other rubrics asks judges about the recorded answers, and runs no code."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from consumers.regrade.consumer import CONSUMER
from consumers.regrade.part import regrade_part
from infra.identity.secrets.memory import MemorySecrets
from infra.model_api.judgements import MemoryJudgements
from infra.model_api.providers.client import ProviderClient
from infra.model_api.providers.judges import ProviderJudges
from schemas.events import RegradeStarted
from schemas.specs import RubricSpec
from tests.kit.decider import given
from tests.kit.fakes import Bench, FakeUserCode, bench
from tests.kit.provider import Reply, completion, provider
from tests.kit.specs import rollout_ref
from tests.unit.consumers.regrade.test_regrade import (
    REQUESTED,
    backwards,
    effect,
    grades_of,
    record_groups,
)


def by_answer(_: int, body: Any) -> Reply:
    score = 0.5 if "answer 1" in body["messages"][1]["content"] else 0.25
    return completion(json.dumps({"explanation": "because", "score": score}))


def test_other_judges_get_the_keys_of_the_person_who_asks_and_not_of_the_author() -> None:
    code = rollout_ref().model_copy(update={"submitter": "ann", "workspace": "w"})
    rubric = RubricSpec(name="kind", text="Is it kind?", model="m", base_url="http://h/v1")
    for submitter in ("bob", None):
        changes = {"source": "rubrics", "rubrics": (rubric,), "submitter": submitter}
        request = REQUESTED.model_copy(update={**changes, "rollout": code, "weights": {}})
        [started] = given(CONSUMER).when(request).events
        assert isinstance(started, RegradeStarted)
        assert started.rollout.submitter == submitter


async def test_new_judgements_are_added_to_the_recorded_reward_of_the_code(tmp_path: Path) -> None:
    user = FakeUserCode(grader=backwards)
    made = bench(tmp_path, user=user)
    async with provider(by_answer) as fake:
        client = ProviderClient(None, first_pause_s=0.001)
        ports = replace(
            made.ports,
            judges=ProviderJudges(client, patience_s=1),
            judgements=MemoryJudgements(),
            secrets=MemorySecrets(),
        )
        world = Bench(ports, made.world, made.blobs, made.clock)
        await record_groups(world, number=1)
        rubric = RubricSpec(
            name="kind", text="Is it kind?", model="m", base_url=fake.base_url, weight=2.0
        )
        rollout = rollout_ref().model_copy(update={"rubrics": (rubric,)})
        asked = effect(REQUESTED, rubrics=(rubric,), weights={})
        outcome = await regrade_part(asked.model_copy(update={"rollout": rollout}), world.ports)
        [group] = (await grades_of(world, outcome)).groups
        await client.aclose()
    assert user.num_gradings == 0
    assert [grade.reward for grade in group.after] == [0.5, 2.0]
    assert [grade.parts for grade in group.after] == [
        {"grader": 0.0, "kind": 0.25},
        {"grader": 1.0, "kind": 0.5},
    ]
