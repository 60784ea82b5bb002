"""Estimates of the time of a step, and of memory."""

from typing import Any

import pytest

from producers.core.estimates import CPU_TRAIN_FLOPS, Reader, _cpu_step_s, estimate
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


def estimated(*readers: Reader) -> Any:
    advanced = Advanced(algorithm="distill", teacher="big", precision="bfloat16")
    config = RunConfig(experiment=Experiment(model_path="m", dataset="d"), advanced=advanced)
    return estimate(config, 1_000_000, steps=3, gpu=False, readers=readers)


def test_a_teacher_reads_each_sample_and_is_loaded_unless_it_is_the_model() -> None:
    alone, other = estimated(), estimated(Reader(50_000_000, is_loaded=True))
    tokens = 32 * 8 * (128 + 4096)
    assert other["step_s"] - alone["step_s"] == pytest.approx(
        2 * 50e6 * tokens / CPU_TRAIN_FLOPS, abs=2e-3
    )
    assert other["total_s"] == pytest.approx(3 * other["step_s"], abs=0.1)
    assert other["memory_bytes"] - alone["memory_bytes"] == 2 * 50_000_000
    own = estimated(Reader(1_000_000, is_loaded=False))
    assert own["memory_bytes"] == alone["memory_bytes"]
    assert own["step_s"] > alone["step_s"]


def test_a_teacher_of_unknown_size_is_named_as_left_out() -> None:
    unknown = estimated(Reader(None, is_loaded=True))
    assert unknown["step_s"] == estimated()["step_s"]
    assert unknown["assumes"].endswith("nor a teacher or reward model whose size is unknown")


@pytest.mark.parametrize(
    ("parameters", "changes", "copies"),
    [
        (135_000_000, {}, 5),
        (135_000_000, {"tuning": "full"}, 4),
        (135_000_000, {"precision": "bfloat16"}, 0),
        (135_000_000, {"algorithm": "sft"}, 0),
        (400_000_000, {}, 4),
        (600_000_000, {}, 0),
    ],
)
def test_a_cpu_s_sampler_copies_the_weights_of_a_small_model(
    parameters: int, changes: dict[str, Any], copies: int
) -> None:
    """For four versions, and once more the base, which is packed for C. A worker that sampled seven
    versions of SmolLM2-135M took 4.0 GB."""
    advanced = Advanced.model_validate(changes)
    config = RunConfig(experiment=Experiment(model_path="m", dataset="d"), advanced=advanced)
    on_cpu, on_gpu = (
        estimate(config, parameters, steps=9, gpu=gpu)["memory_bytes"] for gpu in (False, True)
    )
    assert isinstance(on_cpu, int)
    assert isinstance(on_gpu, int)
    assert on_cpu - on_gpu == copies * 4 * parameters
