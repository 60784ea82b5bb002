"""Estimates of the time of a step."""

from producers.core.estimates import _cpu_step_s
from schemas.config import Advanced, Experiment, RunConfig


def step_s(algorithm: str) -> float:
    advanced = Advanced.model_validate({"algorithm": algorithm})
    experiment = Experiment(model_path="m", dataset="d")
    return _cpu_step_s(RunConfig(experiment=experiment, advanced=advanced), 1_000_000)


def test_a_pair_costs_two_answers_and_a_reference_a_pass() -> None:
    sft = step_s("sft")
    assert step_s("simpo") == step_s("orpo") == 2 * sft
    assert step_s("dpo") > step_s("simpo") > step_s("kto") > sft


def test_online_dpo_trains_two_samples_of_each_group() -> None:
    """Of 8 samples by default, so its step costs less than that of GRPO."""
    assert step_s("online_dpo") < step_s("grpo")
