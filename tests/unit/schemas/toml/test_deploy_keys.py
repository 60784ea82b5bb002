"""A run that could not deploy its best checkpoint is refused when it is submitted, not when it ends."""

from typing import Any

import pytest

from tests.kit.tomls import run_issues

VALID: dict[str, Any] = {"validation_dataset": "held-out", "deploy": "best"}
EXPERIMENT: dict[str, Any] = {
    "model_path": "m",
    "dataset": "d",
    "rollout": "say",
    "entrypoint": "main.py",
}


def issues_of(advanced: dict[str, Any], **experiment: Any) -> dict[str, str]:
    given = {"experiment": {**EXPERIMENT, **experiment}, "advanced": advanced}
    return {issue.key: issue.message for issue in run_issues(given)}


def test_a_run_may_deploy_its_best_checkpoint() -> None:
    assert issues_of(VALID) == {}
    assert issues_of({**VALID, "deploy_name": "sums"}) == {}


@pytest.mark.parametrize(
    ("advanced", "key", "words"),
    [
        ({"deploy": "best"}, "advanced.deploy", "validation_dataset"),
        ({**VALID, "tuning": "full"}, "advanced.deploy", "lora"),
        ({"deploy_name": "sums"}, "advanced.deploy_name", "needs advanced.deploy"),
        ({**VALID, "deploy_name": "No Name"}, "advanced.deploy_name", ""),
        ({**VALID, "deploy": "last"}, "advanced.deploy", "best"),
    ],
)
def test_a_deployment_that_could_not_be_made_is_refused(
    advanced: dict[str, Any], key: str, words: str
) -> None:
    found = issues_of(advanced)
    assert list(found) == [key]
    assert words in found[key]
