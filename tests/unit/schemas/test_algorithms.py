"""Each key of an algorithm is read by it or refused by name; a key is never ignored."""

from typing import Any

import pytest

from schemas.algorithms import (
    DISTILLED,
    OFFLINE,
    READ_BY,
    SAMPLED,
    SCORED,
    filters_groups,
    replacements,
)
from schemas.config import Advanced
from tests.kit.tomls import run_issues

VALUES: dict[str, Any] = {
    "attest": False,
    "divergence": "kl",
    "cov_high": 2.0,
    "loss_aggregation": "token_mean",
    "kl_estimator": "k1",
    "kl_in": "reward",
    "clip_delta": 9.0,
    "correction_level": "token",
    "correction_low": 0.5,
    "correction_high": 2.0,
    "filter_groups": True,
    "max_replacements": 2,
    "curriculum": {"max_pass_rate": 0.9},
    "minibatch_size": 4,
    "overlong_buffer": 4,
    "overlong_penalty": 0.5,
    "mask_truncated": True,
    "mask_failed": True,
    "failed_rewards": {"timeout": 0.0},
    "entropy_coef_max": 5.0,
    "group_baseline": True,
    "agent_advantages": True,
    "loss_turns": "last",
    "preference_loss": "sigmoid_norm",
    "label_smoothing": 0.1,
    "teacher": "old@last",
    "teacher_hint": "It is {ground_truth}.",
    "teacher_base_url": "https://10.0.0.5:8000/v1",
    "teacher_api_key_secret": "TEACHER_KEY",
}
"""A valid value of each key; 0.5 is one of the others."""

ON_SERVER = {"teacher": "provider:m", "teacher_base_url": "https://10.0.0.5:8000/v1"}

RUBRIC = {"text": "It is polite.", "model": "openai/gpt-5-mini"}

OF_ALGORITHM: dict[str, dict[str, Any]] = {
    "gdpo": {"rewards": [{"name": "right"}, {"name": "short", "weight": 0.5}]},
    "distill": {"teacher": "old@last"},
}
"""What an algorithm needs besides."""

NEEDS: dict[str, dict[str, Any]] = {
    "correction_level": {"correction": "masked"},
    "correction_low": {"correction": "masked"},
    "correction_high": {"correction": "masked"},
    "max_replacements": {"filter_groups": True},
    "overlong_penalty": {"overlong_buffer": 4},
    "mask_failed": {"failed_reward": "grade"},
    "entropy_coef_delta": {"entropy_target": 0.2},
    "entropy_coef_max": {"entropy_target": 0.2},
    "teacher_base_url": {"teacher": "provider:m"},
    "teacher_api_key_secret": {"teacher": "provider:m", "teacher_base_url": "https://h/v1"},
}


def refused(samples: int = 2, **advanced: Any) -> dict[str, str]:
    """The errors for this `[advanced]` section, as key -> message."""
    document = {
        "experiment": {
            "rollout": "r",
            "entrypoint": "main.py",
            "model_path": "m",
            "dataset": "d",
        },
        "training": {"n_samples_per_prompt": samples, "max_response_length": 8},
        "advanced": advanced,
    }
    if advanced.get("algorithm") in OFFLINE:
        del document["training"]
    if advanced.get("algorithm") in SCORED:
        document["experiment"] = {"model_path": "m", "dataset": "d"}
    return {issue.key: issue.message for issue in run_issues(document)}


@pytest.mark.parametrize("algorithm", [*SAMPLED, *OFFLINE, *DISTILLED])
@pytest.mark.parametrize("key", READ_BY)
def test_a_key_is_read_or_refused(algorithm: str, key: str) -> None:
    said = {"algorithm": algorithm, key: VALUES.get(key, 0.5), **NEEDS.get(key, {})}
    if algorithm == "gdpo" and "failed_reward" in said:
        said["failed_reward"] = "grade"
    elif (algorithm, key) == ("gdpo", "failed_rewards"):
        said[key] = {"timeout": "grade"}
    issues = refused(**(OF_ALGORITHM.get(algorithm, {}) | said))
    if algorithm in READ_BY[key]:
        assert issues == {}
    else:
        assert algorithm in issues[f"advanced.{key}"]


def test_every_key_that_may_be_silent_is_in_the_table() -> None:
    silent = {name for name, field in Advanced.model_fields.items() if field.default is None}
    others = {
        "max_steps",
        "max_steps_off_policy",
        "adam_beta2",
        "lora_scaling",
        "lora_variant",
        "optimizer",
        "muon_momentum",
        "micro_batch_tokens",
        "validation_dataset",
        "state_interval",
        "date",
        "deploy",
        "deploy_name",
        "project",
        "judge_max_calls",
        "judge_max_tokens",
        "judge_max_usd",
        "max_sample_tokens",
        "max_turns",
    }
    assert set(READ_BY) == silent - others


@pytest.mark.parametrize(
    ("advanced", "key"),
    [
        ({"correction_high": 2.0}, "advanced.correction_high"),
        ({"correction": "truncated", "correction_low": 0.5}, "advanced.correction_low"),
        ({"correction": "decoupled", "correction_high": 2.0}, "advanced.correction_high"),
        ({"clip_delta": 1.2}, "advanced.clip_delta"),
        ({"clip_delta": 1.5, "clip_high": 0.5}, "advanced.clip_delta"),
        ({"algorithm": "dapo", "clip_delta": 1.25}, "advanced.clip_delta"),
        ({"algorithm": "clip_cov", "clip_delta": 2.0}, "advanced.clip_delta"),
        ({"algorithm": "clip_cov", "cov_low": 5.0}, "advanced.cov_low"),
        ({"algorithm": "clip_cov", "cov_high": 0.5}, "advanced.cov_low"),
        ({"overlong_buffer": 9}, "advanced.overlong_buffer"),
        ({"overlong_penalty": 1.0}, "advanced.overlong_penalty"),
        ({"max_replacements": 1}, "advanced.max_replacements"),
        ({"mask_failed": True}, "advanced.mask_failed"),
        ({"mask_failed": True, "failed_reward": "drop"}, "advanced.mask_failed"),
        ({"entropy_coef_delta": 0.1}, "advanced.entropy_coef_delta"),
        ({"entropy_coef": 0.1, "entropy_coef_max": 0.2}, "advanced.entropy_coef_max"),
        ({"entropy_coef": 1.5, "entropy_target": 0.2}, "advanced.entropy_coef"),
        (
            {"entropy_coef": 0.5, "entropy_target": 0.2, "entropy_coef_max": 0.1},
            "advanced.entropy_coef",
        ),
        ({"minibatch_size": 3}, "advanced.minibatch_size"),
        ({"minibatch_size": 6}, "advanced.minibatch_size"),
        ({"minibatch_size": 128}, "advanced.minibatch_size"),
        ({"algorithm": "sft", "correction": "masked"}, "advanced.correction"),
        ({"max_steps_off_policy": 1}, "advanced.max_steps_off_policy"),
        (
            {"execution_mode": "one_step_off_async", "max_steps_off_policy": 2},
            "advanced.max_steps_off_policy",
        ),
        (
            {"execution_mode": "fully_async", "max_steps_off_policy": 0},
            "advanced.max_steps_off_policy",
        ),
        ({"algorithm": "sft", "execution_mode": "fully_async"}, "advanced.execution_mode"),
        ({"algorithm": "sft", "weight_sync_interval": 2}, "advanced.weight_sync_interval"),
        ({"algorithm": "sft", "updates_per_step": 2}, "advanced.updates_per_step"),
        ({"algorithm": "dpo", "updates_per_step": 2}, "advanced.updates_per_step"),
        ({"algorithm": "simpo", "execution_mode": "fully_async"}, "advanced.execution_mode"),
        (
            {"algorithm": "dpo", "preference_loss": "ipo", "label_smoothing": 0.1},
            "advanced.label_smoothing",
        ),
        ({"algorithm": "kto", "batch_size": 1}, "advanced.batch_size"),
        ({"algorithm": "online_dpo", "correction": "decoupled"}, "advanced.correction"),
        ({"algorithm": "online_dpo", "updates_per_step": 2}, "advanced.updates_per_step"),
        (
            {"algorithm": "online_dpo", "preference_loss": "hinge", "label_smoothing": 0.1},
            "advanced.label_smoothing",
        ),
        ({"algorithm": "online_dpo", "batch_size": 4}, "advanced.batch_size"),
    ],
)
def test_contradictions_are_refused(advanced: dict[str, Any], key: str) -> None:
    assert list(refused(**advanced)) == [key]


def test_the_size_of_a_mini_batch_is_refused_with_the_numbers_it_contradicts() -> None:
    """The step has 32 groups of 2 samples."""
    assert "n_samples_per_prompt (2)" in refused(minibatch_size=3)["advanced.minibatch_size"]
    message = refused(minibatch_size=6)["advanced.minibatch_size"]
    assert "= 64, got 6" in message
    assert refused(minibatch_size=64) == {}
    assert refused(minibatch_size=2) == {}


@pytest.mark.parametrize(
    ("advanced", "key", "says"),
    [
        ({}, "rewards", "with those of advanced.rubrics and advanced.reward_models, got 0"),
        ({"rewards": [{"name": "a"}]}, "rewards", "got 1"),
        ({"rubrics": [RUBRIC, {**RUBRIC, "name": "b"}]}, "rewards", "must name reward functions"),
        (
            {"rewards": [{"name": "a"}, {"name": "b", "weight": 0.0}]},
            "rewards",
            "'b' a weight other than 0",
        ),
        ({**OF_ALGORITHM["gdpo"], "failed_reward": 0.0}, "failed_reward", "has no parts"),
        (
            {**OF_ALGORITHM["gdpo"], "failed_rewards": {"timeout": -1.0}},
            "failed_rewards",
            "timeout",
        ),
        ({**OF_ALGORITHM["gdpo"], "kl_in": "reward"}, "kl_in", "has no meaning for gdpo"),
        (
            {**OF_ALGORITHM["gdpo"], "overlong_buffer": 4},
            "overlong_buffer",
            "has no meaning for gdpo; leave it out, or use a reinforcement learning algorithm other",
        ),
    ],
)
def test_gdpo_needs_rewards_of_named_parts(advanced: dict[str, Any], key: str, says: str) -> None:
    assert says in refused(algorithm="gdpo", **advanced)[f"advanced.{key}"]


def test_gdpo_takes_reward_functions_with_rubrics() -> None:
    assert refused(algorithm="gdpo", rewards=[{"name": "a"}], rubrics=[RUBRIC]) == {}


@pytest.mark.parametrize(
    ("algorithm", "key", "meant"),
    [
        ("grpo", "beta", "advanced.kl_coef"),
        ("dpo", "kl_coef", "advanced.beta"),
        ("online_dpo", "kl_coef", "advanced.beta"),
        ("sft", "kl_coef", None),
        ("sft", "beta", None),
    ],
)
def test_the_weight_of_the_reference_is_found_under_the_name_of_the_other_family(
    algorithm: str, key: str, meant: str | None
) -> None:
    given = {"algorithm": algorithm, key: 0.1}
    sections = {} if algorithm in OFFLINE else {"training": {"n_samples_per_prompt": 2}}
    code = {"rollout": "r", "entrypoint": "main.py", "model_path": "m", "dataset": "d"}
    (issue,) = run_issues({"experiment": code, **sections, "advanced": given})
    assert (issue.key, issue.did_you_mean) == (f"advanced.{key}", meant)


@pytest.mark.parametrize(
    ("advanced", "key", "says"),
    [
        ({}, "teacher", "is missing; name the model that distill learns from"),
        (
            {"teacher": "provider:x"},
            "teacher_base_url",
            "is missing; set it to the vLLM server that",
        ),
        ({**ON_SERVER, "teacher_hint": "x"}, "teacher_hint", "has no meaning with a teacher on a"),
        ({**ON_SERVER, "distill_beta": 0.5}, "distill_beta", "must be 1 (the reverse KL) with a"),
        (
            {"teacher": "a@1", "teacher_base_url": "https://h/v1"},
            "teacher_base_url",
            "has no meaning with teacher = 'a@1', which is not on a server; write teacher = 'prov",
        ),
        (
            {"teacher": "a@1", "teacher_api_key_secret": "KEY"},
            "teacher_api_key_secret",
            "has no meaning with teacher = 'a@1'",
        ),
        ({**ON_SERVER, "teacher_api_key_secret": "a key"}, "teacher_api_key_secret", "must match"),
        ({"teacher": "self"}, "teacher", "nothing to teach without a hint; set"),
        ({"teacher": "self", "teacher_hint": " "}, "teacher_hint", "is blank"),
        ({"teacher": "a@1", "correction": "truncated"}, "correction", "no meaning for distill"),
        ({"teacher": "a@1", "updates_per_step": 2}, "updates_per_step", "must be 1 for distill"),
        ({"teacher": "a@1", "distill_beta": 1.5}, "distill_beta", "must be at most 1"),
        ({"teacher": "a@1", "distill_beta": -1}, "distill_beta", "must be at least 0"),
    ],
)
def test_a_run_that_distils_has_a_teacher_and_no_ratio(
    advanced: dict[str, Any], key: str, says: str
) -> None:
    assert says in refused(algorithm="distill", **advanced)[f"advanced.{key}"]


def test_a_teacher_on_a_server_reads_a_temperature_of_one() -> None:
    code = {"rollout": "r", "entrypoint": "main.py", "model_path": "m", "dataset": "d"}
    asked = {"experiment": code, "advanced": {"algorithm": "distill", **ON_SERVER}}
    assert run_issues(asked) == ()
    (issue,) = run_issues({**asked, "sampling": {"rollout_temperature": 0.7}})
    assert issue.key == "sampling.rollout_temperature"
    assert "must be 1 with a teacher on a server" in issue.message
    assert "got 0.7" in issue.message


def test_a_run_that_distils_takes_one_sample_of_a_prompt() -> None:
    assert refused(samples=1, algorithm="distill", teacher="self", teacher_hint="think") == {}


def test_a_group_of_one_has_nothing_to_compare_with() -> None:
    assert "training.n_samples_per_prompt" in refused(samples=1)
    assert "training.n_samples_per_prompt" in refused(samples=1, algorithm="online_dpo")
    assert refused(samples=1, algorithm="ppo") == {}
    assert refused(samples=1, algorithm="reinforce_plus_plus") == {}


def test_a_reward_model_is_an_adapter_and_writes_no_answers() -> None:
    document = {
        "experiment": {"model_path": "m", "dataset": "d", "rollout": "r", "entrypoint": "main.py"},
        "advanced": {"algorithm": "reward_model", "tuning": "full"},
    }
    issues = {issue.key: issue.message for issue in run_issues(document)}
    assert set(issues) == {"advanced.tuning", "experiment.rollout"}
    assert "must be 'lora' for reward_model" in issues["advanced.tuning"]


def test_only_dapo_filters_by_itself() -> None:
    assert filters_groups(Advanced(algorithm="dapo"))
    assert not filters_groups(Advanced())
    assert replacements(Advanced()) == 0
    assert replacements(Advanced(algorithm="dapo")) == 4
    assert replacements(Advanced(algorithm="dapo", filter_groups=False)) == 0
    assert replacements(Advanced(filter_groups=True, max_replacements=0)) == 0


def test_a_run_that_does_not_set_the_newest_keys_is_stored_as_before() -> None:
    newest: dict[str, Any] = {"cov_ratio": 0.1, "cov_low": 1.0, "cov_high": 2.0, "cov_kl_coef": 1.0}
    newest |= {"turn_reward_coef": 0.5, "minibatch_size": 8, "mask_failed": True}
    newest |= {"agent_advantages": True, **ON_SERVER, "teacher_api_key_secret": "TEACHER_KEY"}
    newest |= {"center_rewards_coefficient": 0.1}
    newest |= {"entropy_coef": 0.1, "entropy_target": 1.0, "lora_variant": "dora", "beta": 0.1}
    assert not set(newest) & set(Advanced().model_dump())
    assert Advanced.model_validate_json(Advanced(**newest).model_dump_json()) == Advanced(**newest)
