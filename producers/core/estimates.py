"""A rough estimate of what a run will need, for `train submit --dry-run`.

Time is estimated only when there is no GPU, and the estimate says what it assumes. All figures are
derived from the model's number of parameters (`producers/core/models/model_facts.py`). If that is
unknown, there are no figures.
"""

from collections.abc import Mapping
from pathlib import Path

from schemas.algorithms import PAIRED, PAIRS_OF_GROUPS, is_offline
from schemas.config import RunConfig

CPU_TRAIN_FLOPS = 120e9
CPU_SAMPLE_FLOPS = 25e9
"""The throughput of two ordinary cores in floating-point operations per second: for forward and backward
passes over packed rows, and for decoding one token at a time."""

FP32_BYTES = 4
BASE_BYTES = {"float32": 4, "bfloat16": 2}
LORA_SHARE = 0.02
"""The number of LoRA parameters per base parameter, at rank 16 on all linear layers of a small model."""
LORA_RANK = 16

RUNTIME_BYTES = 600 << 20
"""The memory of a worker that has loaded torch but no model."""


def estimate(
    config: RunConfig, parameters: int | None, *, steps: int, gpu: bool
) -> Mapping[str, int | float | str | None]:
    """The memory of a worker in bytes, and the seconds per step and in total on a CPU, by name. A figure
    that is not known is None."""
    if parameters is None:
        return {"parameters": None, "memory_bytes": None}
    advanced = config.advanced
    share = 1.0 if advanced.tuning == "full" else LORA_SHARE * advanced.lora_rank / LORA_RANK
    trained = int(parameters * share)
    memory = RUNTIME_BYTES + BASE_BYTES[advanced.precision] * parameters + 4 * FP32_BYTES * trained
    figures: dict[str, int | float | str | None] = {
        "parameters": parameters,
        "memory_bytes": memory,
    }
    if gpu:
        return figures
    step_s = _cpu_step_s(config, parameters)
    return figures | {
        "step_s": round(step_s, 3),
        "total_s": round(steps * step_s, 1),
        "assumes": "two CPU cores, answers half as long as allowed, user code not counted",
    }


def has_gpu() -> bool:
    """Whether a GPU's device file exists."""
    return Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()


def _cpu_step_s(config: RunConfig, count: int) -> float:
    if is_offline(config.advanced):
        tokens = config.advanced.batch_size * min(config.advanced.max_sequence_length, 256) / 2
        answers = 2 if config.advanced.algorithm in PAIRED else 1
        passes = 8 if config.advanced.algorithm in ("dpo", "kto") else 6  # 2 for the reference
        return passes * count * tokens * answers / CPU_TRAIN_FLOPS
    training = config.training
    rows = training.rollout_batch_size * training.n_samples_per_prompt
    answer = training.max_response_length / 2
    prompt = min(training.max_prompt_length, 256) / 2
    sampled = 2 * count * rows * answer / CPU_SAMPLE_FLOPS
    passes = 6 * rows
    if config.advanced.algorithm in PAIRS_OF_GROUPS:
        passes = 8 * 2 * training.rollout_batch_size  # two samples of a group, and the reference
    return sampled + passes * count * (prompt + answer) / CPU_TRAIN_FLOPS
