"""Mistakes in a TOML become sentences with a key; unsupported features are refused by name."""

import datetime
import difflib
from typing import Any

import pytest

from schemas.errors import InvalidConfig, Issue
from schemas.toml.config_issues import config_issues, unsupported
from schemas.toml.parser import MOST_ISSUES, parse_eval, parse_run
from tests.kit.tomls import eval_issues, run_issues

EXPERIMENT = {
    "rollout": "say",
    "entrypoint": "main.py",
    "model_path": "scratch:qwen3-tiny",
    "dataset": "sums",
}


def toml(**sections: Any) -> dict[str, Any]:
    merged: dict[str, Any] = {"experiment": dict(EXPERIMENT)}
    for name, values in sections.items():
        known = merged.get(name)
        if isinstance(known, dict) and isinstance(values, dict):
            merged[name] = {**known, **values}
        else:
            merged[name] = values
    return merged


def refused(**sections: Any) -> dict[str, Issue]:
    issues = run_issues(toml(**sections))
    assert issues
    return {issue.key: issue for issue in issues}


def test_a_good_file_has_the_defaults() -> None:
    config = parse_run(toml(training={"lr": 1}, env={"API_HOST": "x"}))
    assert config.training.lr == 1.0
    assert config.training.n_samples_per_prompt == 8
    assert config.advanced.algorithm == "grpo"
    assert not list(config_issues(config))


@pytest.mark.parametrize(
    ("sections", "key", "says", "meant"),
    [
        ({"train": {"lr": 1}}, "train", "unrecognized section", "training"),
        ({"lr": 1}, "lr", "unrecognized key", "training.lr"),
        ({"training": {"lrr": 1}}, "training.lrr", "unrecognized key", "training.lr"),
        ({"training": {"seed": 1}}, "training.seed", "unrecognized key", "advanced.seed"),
        (
            {"training": {"rollout_temprature": 1}},
            "training.rollout_temprature",
            "unrecognized key",
            "sampling.rollout_temperature",
        ),
        ({"training": {"lr": -1}}, "training.lr", "must be greater than 0, got -1", None),
        ({"training": {"lr": "x"}}, "training.lr", 'must be a number, got "x"', None),
        (
            {"training": {"total_epochs": 1.5}},
            "training.total_epochs",
            "must be a whole number, got 1.5",
            None,
        ),
        (
            {"training": {"total_epochs": 0}},
            "training.total_epochs",
            "must be at least 1, got 0",
            None,
        ),
        ({"advanced": {"deterministic": 1}}, "advanced.deterministic", "true or false", None),
        ({"advanced": {"algorithm": "grp"}}, "advanced.algorithm", "must be one of", "grpo"),
        (
            {"advanced": {"failed_reward": "zero"}},
            "advanced.failed_reward",
            "'drop' or 'grade'",
            None,
        ),
        ({"advanced": {"failed_reward": 1e9}}, "advanced.failed_reward", "to 1000000", None),
        (
            {"advanced": {"failed_rewards": {"timeout": True}}},
            "advanced.failed_rewards.timeout",
            "'drop' or 'grade'",
            None,
        ),
        (
            {"advanced": {"failed_rewards": {"time_out": 0.0}}},
            "advanced.failed_rewards.time_out",
            "unrecognized key",
            "advanced.failed_rewards.timeout",
        ),
        (
            {"advanced": {"curriculum": {"hard_fration": 0.1}}},
            "advanced.curriculum.hard_fration",
            "unrecognized key",
            "advanced.curriculum.hard_fraction",
        ),
        (
            {"advanced": {"curriculum": {"easy_threshold": 0.9}}},
            "advanced.curriculum.easy_threshold",
            "unrecognized key",
            "advanced.curriculum.max_pass_rate",
        ),
        (
            {"advanced": {"curriculum": {"width": 1}}},
            "advanced.curriculum.width",
            "unrecognized key; use one of min_pass_rate, max_pass_rate, ",
            None,
        ),
        (
            {"advanced": {"reward_models": [{"model_path": "a@1", "model": "a@1"}]}},
            "advanced.reward_models[0].model_path",
            "unrecognized key",
            "advanced.reward_models[0].model",
        ),
        (
            {"advanced": {"reward_models": {"model": "a@1"}}},
            "advanced.reward_models",
            "must be a list; write [[advanced.reward_models]]",
            None,
        ),
        ({"advanced": {"hint": "x"}}, "advanced.hint", "unrecognized", "advanced.teacher_hint"),
        ({"advanced": {"network": {"a": 1}}}, "advanced.network", "must be a list, got {", None),
        ({"advanced": {"lora_targets": 3}}, "advanced.lora_targets", "or a list of strings", None),
        ({"advanced": {"lora_targets": ["a", 1]}}, "advanced.lora_targets", '["a", 1]', None),
        (
            {"advanced": {"rewards": [{"weight": 1}]}},
            "advanced.rewards[0].name",
            "is missing",
            None,
        ),
        (
            {"advanced": {"rewards": [{"name": "a", "weight": float("nan")}]}},
            "advanced.rewards[0].weight",
            "finite",
            None,
        ),
        (
            {"advanced": {"rewards": [{"name": "a", "weight": -1e308}]}},
            "advanced.rewards[0].weight",
            "must be from -1,000,000 to 1,000,000, got -1e+308",
            None,
        ),
        (
            {"advanced": {"reward_models": [{"model": "a@1", "weight": 1e308}]}},
            "advanced.reward_models[0].weight",
            "must be from -1,000,000 to 1,000,000, got 1e+308",
            None,
        ),
        (
            {
                "advanced": {
                    "rubrics": [
                        {"text": "t", "model": "openai/m", "scale": [-20.0, 10.0], "weight": 60_000}
                    ]
                }
            },
            "advanced.rubrics[0].weight",
            "must be from -50,000 to 50,000, got 60000",
            None,
        ),
        ({"training": {"lr": float("inf")}}, "training.lr", "finite", None),
        (
            {"experiment": {"branch": datetime.date(2026, 1, 1)}},
            "experiment.branch",
            "put it in quotes",
            None,
        ),
        ({"experiment": {"branch": "a b"}}, "experiment.branch", "without white space", None),
        ({"experiment": {"commit_sha": "xyz"}}, "experiment.commit_sha", "hex", None),
        ({"experiment": {"entrypoint": "../x.py"}}, "experiment.entrypoint", "inside", None),
        ({"experiment": {"entrypoint": "/x.py"}}, "experiment.entrypoint", "inside", None),
        ({"experiment": {"entrypoint": "main"}}, "experiment.entrypoint", "Python file", None),
        ({"advanced": {"algorithm": "gpro"}}, "advanced.algorithm", "must be one of", "grpo"),
        ({"advanced": {"algorithm": "DPO"}}, "advanced.algorithm", 'got "DPO"', "dpo"),
        ({"advanced": {"algorithm": "Dr. GRPO"}}, "advanced.algorithm", "one of", "dr_grpo"),
        ({"training": 3}, "training", "must be a table", None),
        ({"env": {"lower": "x"}}, "env.lower", "not the name of a variable", None),
        ({"env": {"A": 1}}, "env.A", "must be a string", None),
        ({"env": {"_OSMOSIS_X": "1"}}, "env._OSMOSIS_X", "reserved", None),
        ({"env": {"LD_PRELOAD": "x"}}, "env.LD_PRELOAD", "dynamic linker", None),
        ({"env": {"GLIBC_TUNABLES": "x"}}, "env.GLIBC_TUNABLES", "dynamic linker", None),
        ({"env": {"PYTHONPATH": "x"}}, "env.PYTHONPATH", "how Python starts", None),
        ({"env": {"PATH": "x"}}, "env.PATH", "same for all rollouts", None),
        ({"env": {"HOME": "x"}}, "env.HOME", "same for all rollouts", None),
        ({"secrets": {"required": ["a"]}}, "secrets.required[0]", "A-Z", None),
        ({"secrets": {"required": ["A", "A"]}}, "secrets.required[1]", "twice", None),
        (
            {"secrets": {"required": ["A"]}, "env": {"A": "x"}},
            "secrets.required[0]",
            "[env] sets too",
            None,
        ),
    ],
)
def test_a_mistake_is_named(
    sections: dict[str, Any], key: str, says: str, meant: str | None
) -> None:
    issues = refused(**sections)
    assert key in issues, issues
    assert says in issues[key].message
    assert issues[key].did_you_mean == meant


def test_all_mistakes_are_told_at_once_and_the_first_is_quoted() -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_run(toml(training={"lr": -1, "total_epochs": 0}))
    assert len(caught.value.issues) == 2
    assert caught.value.message == (
        "invalid training config: training.lr: must be greater than 0, got -1 (and 1 more)"
    )


def test_a_branch_and_a_commit_are_one_too_many() -> None:
    both = {"branch": "main", "commit_sha": "0123456"}
    assert "not both" in refused(experiment=both)["experiment.commit_sha"].message
    (issue,) = eval_issues(toml(experiment=both))
    assert "not both" in issue.message


def test_missing_sections_and_keys_are_named() -> None:
    with pytest.raises(InvalidConfig, match=r"add the section \[experiment\]"):
        parse_run({})
    with pytest.raises(InvalidConfig, match=r"experiment.dataset: is missing"):
        parse_run({"experiment": {"model_path": "m"}})
    for issues_of in (run_issues, eval_issues):
        issues = issues_of({"experiment": {"model_path": "m", "dataset": "d"}})
        assert [issue.key for issue in issues] == ["experiment.rollout", "experiment.entrypoint"]
        assert all("is missing" in issue.message for issue in issues)


def test_sft_needs_no_code() -> None:
    config = parse_run(
        {"experiment": {"model_path": "m", "dataset": "d"}, "advanced": {"algorithm": "sft"}}
    )
    assert config.experiment.rollout is None


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"sampling": {"rollout_top_p": 0.9}}, "sampling.rollout_top_p"),
        ({"sampling": {"rollout_temperature": 0}}, "sampling.rollout_temperature"),
    ],
)
def test_a_valid_value_that_is_not_built_is_refused_by_name(
    sections: dict[str, Any], key: str
) -> None:
    assert [issue.key for issue in unsupported(parse_run(toml(**sections)))] == [key]


@pytest.mark.parametrize("value", [1e-320, 1e-6, 0.009])
def test_a_temperature_that_is_too_low_to_divide_by_is_refused_by_name(value: float) -> None:
    sections = {
        "sampling": {"rollout_temperature": value},
        "advanced": {"validation_dataset": "d", "validation_temperature": value},
    }
    found = list(config_issues(parse_run(toml(**sections))))
    keys = ["advanced.validation_temperature", "sampling.rollout_temperature"]
    assert [issue.key for issue in found] == keys
    found += config_issues(parse_eval(toml(advanced={"temperature": value})))
    assert found[-1].key == "advanced.temperature"
    assert all(f"at least 0.01, got {value!r}" in issue.message for issue in found)


def test_greedy_and_the_lowest_temperature_are_valid() -> None:
    for value in (0, 0.01):
        validation = {"validation_dataset": "d", "validation_temperature": value}
        config = parse_run(toml(sampling={"rollout_temperature": 0.01}, advanced=validation))
        assert not list(config_issues(config))
        assert not list(config_issues(parse_eval(toml(advanced={"temperature": value}))))


def test_sft_without_code_validates_by_its_loss() -> None:
    config = parse_run(
        {
            "experiment": {"model_path": "m", "dataset": "d"},
            "advanced": {"algorithm": "sft", "validation_dataset": "held-out"},
        }
    )
    assert not list(config_issues(config))


def test_an_evaluation_is_read_with_its_own_sections() -> None:
    config = parse_eval(toml(evaluation={"limit": 5, "n": 2}, advanced={"temperature": 0.5}))
    assert config.evaluation.limit == 5
    assert not list(config_issues(config))
    with pytest.raises(InvalidConfig, match=r"invalid evaluation config: training: unrecognized"):
        parse_eval(toml(training={"lr": 1}))
    with pytest.raises(InvalidConfig, match="use one of limit, n, batch_size, pass_threshold, "):
        parse_eval(toml(evaluation={"pass_k": 4}))


def test_thousands_of_unknown_keys_are_answered_by_the_first_hundred() -> None:
    """Each unknown key is compared with all known keys, so the number of comparisons is bounded."""
    found = refused(training={f"learning_rote_{number}" * 20: 1 for number in range(20_000)})
    assert len(found) <= MOST_ISSUES
    assert all(len(key) < 100 for key in found)


def test_names_are_compared_up_to_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    original = difflib.SequenceMatcher.ratio

    def ratio(matcher: Any) -> float:
        compared.append(str(matcher.a))
        return original(matcher)

    monkeypatch.setattr(difflib.SequenceMatcher, "ratio", ratio)
    refused(training={"x" * 100_000: 1})
    assert compared
    assert max(map(len, compared)) < 100


def test_twin_without_the_bound_every_key_is_an_issue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schemas.toml.parser.MOST_ISSUES", 10**9)
    found = refused(training={f"learning_rote_{number}": 1 for number in range(3 * MOST_ISSUES)})
    assert len(found) == 3 * MOST_ISSUES


@pytest.mark.parametrize(
    "entrypoint", ["x" * 256 + ".py", "/".join(["d"] * 40) + "/main.py", "\ud800.py", "a\0.py"]
)
def test_an_entry_point_that_no_disk_can_hold_is_refused_by_name(entrypoint: str) -> None:
    assert set(refused(experiment={"entrypoint": entrypoint})) == {"experiment.entrypoint"}


def test_a_key_that_is_not_text_is_refused() -> None:
    assert "not text" in refused(training={"\ud800": 1})["training"].message


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("experiment", "dataset", "reasoning-gym:chain_sum?a=\0"),
        ("experiment", "branch", "a\0"),
        ("advanced", "validation_dataset", "\0"),
        ("env", "HOST", "a\0b"),
    ],
)
def test_text_that_a_database_cannot_hold_is_refused(section: str, key: str, value: str) -> None:
    found = refused(**{section: {key: value}})
    message = "must be text without the character U+0000; remove it"
    assert found == {f"{section}.{key}": Issue(f"{section}.{key}", message)}


@pytest.mark.parametrize("key", ["rollout", "commit_sha"])
def test_a_name_that_ends_in_a_newline_is_refused(key: str) -> None:
    assert set(refused(experiment={key: "abcdef0\n"})) == {f"experiment.{key}"}
