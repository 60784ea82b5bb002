"""A key that the run would not read is refused by name, in every section. For a key of another
trainer, the error gives the name that the key has here."""

from typing import Any

import pytest

from schemas.algorithms import OFFLINE
from schemas.config import EvalConfig, RunConfig
from schemas.datasets import Curriculum
from schemas.errors import Issue
from schemas.toml.key_hints import MEANT, hint
from tests.kit.tomls import eval_issues, run_issues

CODE = {"rollout": "say", "entrypoint": "main.py"}
SFT = {"algorithm": "sft"}


def issues_of(sections: dict[str, Any], *, code: bool = True) -> dict[str, Issue]:
    experiment = {"model_path": "m", "dataset": "d", **(CODE if code else {})}
    given = {**sections, "experiment": {**experiment, **sections.get("experiment", {})}}
    return {issue.key: issue for issue in run_issues(given)}


UNREAD_OFFLINE = [
    ("training", "n_samples_per_prompt", 8),
    ("training", "rollout_batch_size", 32),
    ("training", "max_prompt_length", 64),
    ("training", "max_response_length", 64),
    ("training", "max_answer_length", 64),
    ("training", "agent_workflow_timeout_s", 60),
    ("training", "grader_timeout_s", 60),
    ("sampling", "rollout_temperature", 0.7),
    ("experiment", "entrypoint", "main.py"),
    ("experiment", "branch", "main"),
]


def test_an_answer_is_at_most_as_long_as_a_sample() -> None:
    lengths = {"max_response_length": 64, "max_answer_length": 65}
    issues = issues_of({"training": lengths})
    assert (
        "at most training.max_response_length (64)" in issues["training.max_answer_length"].message
    )
    assert not issues_of({"training": {**lengths, "max_answer_length": 64}})


@pytest.mark.parametrize("algorithm", OFFLINE)
@pytest.mark.parametrize(("section", "key", "value"), UNREAD_OFFLINE)
def test_a_run_without_samples_refuses_what_it_does_not_read_even_at_its_default(
    algorithm: str, section: str, key: str, value: object
) -> None:
    advanced = {"algorithm": algorithm}
    assert not issues_of({"advanced": advanced}, code=False)
    found = issues_of({"advanced": advanced, section: {key: value}}, code=False)
    assert list(found) == [f"{section}.{key}"]
    assert "not read" in found[f"{section}.{key}"].message


@pytest.mark.parametrize(("section", "key", "value"), UNREAD_OFFLINE[2:6])
def test_sft_reads_the_limits_of_sampling_where_a_rollout_validates(
    section: str, key: str, value: object
) -> None:
    advanced = {**SFT, "validation_dataset": "held-out"}
    assert not issues_of({"advanced": advanced, section: {key: value}})
    assert list(issues_of({"advanced": SFT, section: {key: value}})) == [f"{section}.{key}"]


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"advanced": {"batch_size": 16}}, "advanced.batch_size"),
        ({"advanced": {"max_sequence_length": 64}}, "advanced.max_sequence_length"),
        ({"advanced": {"tuning": "full", "lora_rank": 16}}, "advanced.lora_rank"),
        ({"advanced": {"tuning": "full", "lora_alpha": 8.0}}, "advanced.lora_alpha"),
        (
            {"advanced": {"tuning": "full", "lora_scaling": "rank_stabilized"}},
            "advanced.lora_scaling",
        ),
        ({"advanced": {"tuning": "full", "lora_variant": "dora"}}, "advanced.lora_variant"),
        ({"advanced": {"muon_momentum": 0.9}}, "advanced.muon_momentum"),
        ({"advanced": {"optimizer": "muon", "adam_beta1": 0.9}}, "advanced.adam_beta1"),
        ({"advanced": {"optimizer": "muon", "adam_beta2": 0.9}}, "advanced.adam_beta2"),
        ({"advanced": {"lr_min_ratio": 0.1}}, "advanced.lr_min_ratio"),
    ],
)
def test_other_runs_refuse_what_they_do_not_read(sections: dict[str, Any], key: str) -> None:
    assert list(issues_of(sections)) == [key]


@pytest.mark.parametrize(
    "also", [{"tuning": "full"}, {"algorithm": "ppo"}, {"lora_variant": "dora"}]
)
def test_muon_leaves_adamw_what_is_not_a_matrix(also: dict[str, Any]) -> None:
    both = {"optimizer": "muon", "adam_beta1": 0.8, "adam_beta2": 0.9, "muon_momentum": 0.9}
    assert not issues_of({"advanced": {**both, **also}})


def test_validation_by_loss_samples_nothing() -> None:
    advanced = {**SFT, "validation_dataset": "held-out", "validation_samples": 4}
    assert list(issues_of({"advanced": advanced}, code=False)) == ["advanced.validation_samples"]
    assert not issues_of({"advanced": advanced})


def test_sft_without_a_rollout_has_no_use_for_an_environment() -> None:
    assert list(issues_of({"advanced": SFT, "env": {"HOST": "x"}}, code=False)) == ["env"]
    assert not issues_of({"advanced": SFT, "env": {"HOST": "x"}})


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("training", "learning_rate", "training.lr"),
        ("advanced", "learning_rate", "training.lr"),
        ("advanced", "beta", "advanced.kl_coef"),
        ("training", "beta", "advanced.beta"),
        ("advanced", "kl_penalty", "advanced.kl_coef"),
        ("training", "kl_loss_coef", "advanced.kl_coef"),
        ("training", "num_generations", "training.n_samples_per_prompt"),
        ("training", "temperature", "sampling.rollout_temperature"),
        ("training", "max_new_tokens", "training.max_response_length"),
        ("training", "num_train_epochs", "training.total_epochs"),
        ("advanced", "lora_r", "advanced.lora_rank"),
        ("advanced", "epsilon", "advanced.clip_low"),
        ("advanced", "max_grad_norm", "advanced.grad_clip"),
        ("experiment", "model", "experiment.model_path"),
    ],
)
def test_the_names_of_other_trainers_are_told_ours(section: str, key: str, meant: str) -> None:
    found = issues_of({section: {key: 1}})
    assert found[f"{section}.{key}"].did_you_mean == meant


def test_an_evaluation_is_told_its_own_keys() -> None:
    experiment = {"model_path": "m", "dataset": "d", **CODE}
    (issue,) = eval_issues({"experiment": experiment, "evaluation": {"num_samples": 4}})
    assert issue.did_you_mean == "evaluation.n"


def test_every_hint_names_a_key_and_no_name_is_one_itself() -> None:
    keys = {
        f"{section}.{key}"
        for config in (RunConfig, EvalConfig)
        for section, field in config.model_fields.items()
        for key in getattr(field.annotation, "model_fields", {})
    }
    keys |= {f"advanced.curriculum.{key}" for key in Curriculum.model_fields}
    assert set(MEANT) <= keys
    assert all(hint(name, {full}) == full for full, names in MEANT.items() for name in names)


@pytest.mark.parametrize(
    "place", ["{groundtruth}", "{ground_thruth}", "{label}", "{ ground_truth }"]
)
def test_a_place_in_a_hint_that_nothing_fills_is_refused(place: str) -> None:
    asked = {"algorithm": "distill", "teacher": "self", "teacher_hint": f"It is {place}."}
    (issue,) = issues_of({"advanced": asked}).values()
    assert issue.key == "advanced.teacher_hint"
    assert "write {ground_truth} for the label of a row" in issue.message


@pytest.mark.parametrize("text", ["{ground_truth}", "\\boxed{x}", '{"answer": 1}', "{}"])
def test_other_braces_in_a_hint_are_text(text: str) -> None:
    asked = {"algorithm": "distill", "teacher": "self", "teacher_hint": f"It is {text}."}
    assert issues_of({"advanced": asked}) == {}
