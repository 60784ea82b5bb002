"""What a run will take, roughly, before it runs: for `train submit --dry-run`.

Time is estimated only where no GPU is in sight, and says what it assumes. All figures are derived from
the number of parameters; where that is unknown (a hub id that nobody has fetched), there are none.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from schemas.config import RunConfig
from schemas.models import scratch_shape
from schemas.sampling import ModelRef

CPU_TRAIN_FLOPS = 120e9
CPU_SAMPLE_FLOPS = 25e9
"""What two ordinary cores reach: forward and backward over packed rows; decoding a token at a time."""

FP32_BYTES = 4
LORA_SHARE = 0.02
"""LoRA parameters per base parameter, at rank 16 on all linear layers of a small model."""

RUNTIME_BYTES = 600 << 20
"""A worker with torch loaded and no model."""


def parameters(model: ModelRef) -> int | None:
    """How many parameters a model has, if that can be known without loading it."""
    if model.kind == "scratch":
        return scratch_shape(model.name).num_parameters
    if model.kind == "directory":
        sizes = [file.stat().st_size for file in Path(model.name).glob("*.safetensors")]
        return sum(sizes) // _bytes_per_parameter(Path(model.name)) or None
    sizes = [ref.size for name, ref in model.files.items() if name.endswith("model.safetensors")]
    return sum(sizes) // FP32_BYTES or None


def estimate(
    config: RunConfig, model: ModelRef, *, steps: int, gpu: bool
) -> Mapping[str, int | float | str | None]:
    """Memory of a worker in bytes; seconds per step and in all on a CPU."""
    count = parameters(model)
    if count is None:
        return {"parameters": None, "memory_bytes": None}
    trained = count if config.advanced.tuning == "full" else int(count * LORA_SHARE)
    memory = RUNTIME_BYTES + FP32_BYTES * (count + 4 * trained)
    figures: dict[str, int | float | str | None] = {"parameters": count, "memory_bytes": memory}
    if gpu:
        return figures
    step_s = _cpu_step_s(config, count)
    return figures | {
        "step_s": round(step_s, 3),
        "total_s": round(steps * step_s, 1),
        "assumes": "two CPU cores, answers half as long as allowed, user code not counted",
    }


def has_gpu() -> bool:
    """Whether a GPU's device file is in sight."""
    return Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()


def _cpu_step_s(config: RunConfig, count: int) -> float:
    if config.advanced.algorithm == "sft":
        tokens = config.advanced.batch_size * min(config.advanced.max_sequence_length, 256) / 2
        return 6 * count * tokens / CPU_TRAIN_FLOPS
    training = config.training
    rows = training.rollout_batch_size * training.n_samples_per_prompt
    answer = training.max_response_length / 2
    prompt = min(training.max_prompt_length, 256) / 2
    sampled = 2 * count * rows * answer / CPU_SAMPLE_FLOPS
    return sampled + 6 * count * rows * (prompt + answer) / CPU_TRAIN_FLOPS


def _bytes_per_parameter(directory: Path) -> int:
    try:
        said = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return FP32_BYTES
    kind = said.get("dtype", said.get("torch_dtype")) if isinstance(said, dict) else None
    return FP32_BYTES if kind in (None, "float32") else 2
