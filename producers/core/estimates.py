"""A rough estimate of what a run will need, for `train submit --dry-run`.

Time is estimated only when there is no GPU, and the estimate says what it assumes. All figures are
derived from the number of parameters of the model, its teacher and its reward models
(`producers/core/models/model_facts.py`). If that of the model is unknown, there are no figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from producers.core.lookup import Lookup
from producers.core.models.model_facts import model_facts
from producers.core.validation.validate import Valid
from schemas.algorithms import PAIRED, PAIRS_OF_GROUPS, is_offline, samples_nothing
from schemas.config import RunConfig
from schemas.models.teacher import SELF

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

COPY_BYTES, PACKED_BYTES = 2 << 30, 1 << 30
"""The sizes of the largest float32 base that a CPU's sampler copies for each version, and that it packs
once for C (`trainer/sampler/decode_model.py`)."""
COPIED_VERSIONS = 4
"""Of how many versions the sampler keeps a copy."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A model that reads the samples of a run: its teacher, or a reward model. `parameters` is None if
    their number is unknown. `is_loaded` says that its base is loaded beside the run's own."""

    parameters: int | None
    is_loaded: bool


async def readers_of(config: RunConfig, valid: Valid, lookup: Lookup) -> tuple[Reader, ...]:
    """The teacher and the reward models of a run. Raises InvalidConfig like `model_facts`."""
    found = []
    if config.advanced.teacher == SELF:
        found.append(Reader(valid.facts.parameters, is_loaded=False))
    # A teacher on a server computes there.
    models = [] if valid.teacher is None or valid.teacher.server else [valid.teacher.model]
    for model in (*models, *(one.base for one in valid.reward_models)):
        facts = valid.facts if model == valid.model else await model_facts(model, lookup)
        found.append(Reader(facts.parameters, is_loaded=model != valid.model))
    return tuple(found)


def estimate(
    config: RunConfig,
    parameters: int | None,
    *,
    steps: int,
    gpu: bool,
    readers: Sequence[Reader] = (),
) -> Mapping[str, int | float | str | None]:
    """The memory of a worker in bytes, and the seconds per step and in total on a CPU, by name. A figure
    that is not known is None."""
    if parameters is None:
        return {"parameters": None, "memory_bytes": None}
    advanced = config.advanced
    share = 1.0 if advanced.tuning == "full" else LORA_SHARE * advanced.lora_rank / LORA_RANK
    trained = int(parameters * share)
    memory = RUNTIME_BYTES + BASE_BYTES[advanced.precision] * parameters + 4 * FP32_BYTES * trained
    known = [one.parameters for one in readers if one.parameters is not None]
    memory += BASE_BYTES[advanced.precision] * sum(
        one.parameters or 0 for one in readers if one.is_loaded
    )
    if not gpu:
        memory += _sampler_copies(config, FP32_BYTES * parameters, steps=steps)
    figures: dict[str, int | float | str | None] = {
        "parameters": parameters,
        "memory_bytes": memory,
    }
    if gpu:
        return figures
    step_s = _cpu_step_s(config, parameters, readers=known)
    assumes = "two CPU cores, answers half as long as allowed, user code not counted"
    if len(known) < len(readers):
        assumes += ", nor a teacher or reward model whose size is unknown"
    return figures | {
        "step_s": round(step_s, 3),
        "total_s": round(steps * step_s, 1),
        "assumes": assumes,
    }


def _sampler_copies(config: RunConfig, base_bytes: int, *, steps: int) -> int:
    """The bytes of the copies of the weights that the sampler decodes with on a CPU."""
    advanced = config.advanced
    if samples_nothing(advanced) or advanced.precision != "float32" or base_bytes > COPY_BYTES:
        return 0
    is_packed = base_bytes <= PACKED_BYTES and advanced.tuning == "lora"
    return base_bytes * (min(COPIED_VERSIONS, steps + 1) + is_packed)


def has_gpu() -> bool:
    """Whether a GPU's device file exists."""
    return Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()


def _cpu_step_s(config: RunConfig, count: int, *, readers: Sequence[int] = ()) -> float:
    """The seconds of a step of a model with `count` parameters. `readers` are those of other models that
    read each sample once."""
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
    if samples_nothing(config.advanced):
        sampled = 0.0
    passes = 6 * rows
    if config.advanced.algorithm in PAIRS_OF_GROUPS:
        passes = 8 * 2 * training.rollout_batch_size  # two samples of a group, and the reference
    operations = passes * count + 2 * rows * sum(readers)
    return sampled + operations * (prompt + answer) / CPU_TRAIN_FLOPS
