"""A rubric that compares the answers of a group is refused where there is nothing to compare."""

import json
from typing import Any

import pytest

from schemas.config import RubricWeight
from schemas.specs import RubricSpec, rubric_specs
from tests.kit.specs import config
from tests.kit.tomls import eval_issues, run_issues

KEY = "advanced.rubrics[0].scope"
RUBRIC: dict[str, Any] = {"text": "Which is better?", "model": "openai/gpt-5-mini"}
EXPERIMENT = {"rollout": "r", "entrypoint": "main.py", "model_path": "m", "dataset": "d"}


def refused(samples: int, **rubric: Any) -> dict[str, str]:
    document = {
        "experiment": EXPERIMENT,
        "training": {"n_samples_per_prompt": samples},
        "advanced": {"algorithm": "ppo", "rubrics": [{**RUBRIC, **rubric}]},
    }
    return {issue.key: issue.message for issue in run_issues(document)}


@pytest.mark.parametrize("scope", ["sample", "group"])
def test_a_scope_is_read_where_a_group_has_several_answers(scope: str) -> None:
    assert refused(2, scope=scope) == {}


def test_a_group_of_one_answer_is_not_compared() -> None:
    assert "there is nothing to compare" in refused(1, scope="group")[KEY]
    assert refused(1, scope="sample") == {}


def test_an_evaluation_compares_no_groups() -> None:
    document = {"experiment": EXPERIMENT, "advanced": {"rubrics": [{**RUBRIC, "scope": "group"}]}}
    found = {issue.key: issue.message for issue in eval_issues(document)}
    assert "must be 'sample' in an evaluation, got 'group'" in found[KEY]


def test_another_scope_is_refused_with_the_choice() -> None:
    assert "'sample' or 'group'" in refused(2, scope="batch")[KEY]


def test_a_rubric_without_the_key_is_written_as_before() -> None:
    assert "scope" not in json.loads(RubricWeight(**RUBRIC).model_dump_json())
    spec = RubricSpec(name="r", text="t", model="m")
    assert "scope" not in json.loads(spec.model_dump_json())
    (found,) = rubric_specs(config(advanced={"rubrics": ({**RUBRIC, "scope": "group"},)}).advanced)
    assert found.scope == "group"
    assert RubricSpec.model_validate_json(found.model_dump_json()) == found
