"""The learner turns a policy version and a batch into the next version, and is deterministic.

This module loads versions, calls the training step and exports the version that the step makes. The
step is in `trainer/grpo.py`, for supervised fine-tuning in `trainer/algorithms/sft.py`, for
preferences and online DPO in `trainer/preferences/step.py`, and for distillation in
`trainer/distillation/step.py`.

A step depends only on the loaded tensors, the batch, the run's config and the step number. It reads no
clock, and what it draws follows from the run's seed and the step number. The number of threads is
fixed, and all kernels are deterministic. A version consists of its weights and its optimizer state. A
step from a version that was loaded from its bytes gives the same bits as a step from one that never left
memory. The hash of a version is a Merkle root over its tensors, so a version is serialised only if
something needs its bytes.

A run makes one call at a time. During a step the version is not in the table of loaded versions. The new
version is put there when the step is complete. So after a failed step or a cancelled call `holds`
returns False, and the version is loaded again from its bytes.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch

from schemas.algorithms import DISTILLED, PREFERENCE, REINFORCED, is_offline
from schemas.errors import CorruptData, Refused, TransientError
from schemas.learner import (
    GGUF_VERSION,
    TEACHER_VERSION,
    Conversation,
    GradientComparison,
    LearnedRow,
    LearnerJob,
    LearnerState,
    Preference,
    SamplesRefuted,
    StepBatch,
    StepResult,
)
from schemas.sampling import PolicyRef
from trainer import grpo
from trainer.algorithms import sft
from trainer.algorithms.gradients import compare_gradients
from trainer.algorithms.registry import OBJECTIVES, hyperparameters_of
from trainer.distillation import step as distillation
from trainer.distillation.teacher import TeacherModel, read_hash, write_hash
from trainer.merkle_tree import merkle_root
from trainer.model.base import Base
from trainer.model.chat_template import Chat
from trainer.objective.entropy import COEF, SEEN, EntropyControl, load_control
from trainer.objective.hyperparameters import (
    DEFAULT_MICRO_BATCH_TOKENS,
    Hyperparameters,
    out_of_memory,
)
from trainer.objective.recheck import witness_of
from trainer.optimizer import Optimizers, step_size_at
from trainer.policy import (
    LoadedModel,
    Policy,
    check_fit,
    checkpoint_files,
    export,
    fresh_policy,
    parse,
)
from trainer.preferences import step as preferences
from trainer.preferences.registry import PREFERENCE_OBJECTIVES, settings_of
from trainer.weight_cache import WeightCache

CRITIC = "critic."
"""Prefix of the names of the critic's tensors, and of its optimizer's, in the state of a version."""


@dataclass(slots=True, eq=False)
class LoadedVersion:
    """A policy version on the device, from which a step can be taken."""

    policy: Policy
    optimizers: Optimizers
    entropy: EntropyControl | None = None
    teacher_sha256: str = ""
    weights_sha256: str = ""
    state_sha256: str = ""
    weights_file_sha256: str | None = None

    @property
    def step(self) -> int:
        """The number of the version: how many steps led to it."""
        return self.optimizers.policy.step


class TorchLearner:
    """Takes optimizer steps on the device's thread (`schemas.learner.Learner`)."""

    def __init__(self, cache: WeightCache, *, max_runs: int = 2) -> None:
        self._cache = cache
        self._loaded: dict[str, LoadedVersion] = {}
        self._max_runs = max_runs

    async def initialize(self, job: LearnerJob) -> StepResult:
        """Build version 0. The result has step 0, the weights, the optimizer state and the files of a
        checkpoint directory. Raises Refused when the model cannot be loaded."""
        loaded = await self._cache.load_model(job.model)
        teacher = await self._load_teacher(job)
        result = await self._run_on_device(job, partial(_build_version_zero, loaded, job, teacher))
        assert result is not None  # noqa: S101 - only loading a version has none
        return result

    def holds(self, job: LearnerJob, step: int, weights_sha256: str, state_sha256: str) -> bool:
        """Whether version `step` of this run is loaded with exactly these hashes, so that a step can be
        taken from it."""
        version = self._loaded.get(job.run)
        return version is not None and (
            version.step,
            version.weights_sha256,
            version.state_sha256,
        ) == (step, weights_sha256, state_sha256)

    async def load(self, job: LearnerJob, state: LearnerState) -> None:
        """Load a version from its bytes. Raises CorruptData when its tensors do not fit the model."""
        loaded = await self._cache.load_model(job.model)
        await self._run_on_device(job, partial(_load_version, loaded, job, state))

    async def evaluate(
        self, job: LearnerJob, step: int, rows: Sequence[LearnedRow]
    ) -> dict[str, float]:
        """How the loaded version `step` does on held-out rows, by metric key. Raises TransientError when
        that version is not loaded, and Refused for a row that cannot be learned."""
        version = self._loaded.get(job.run)
        if version is None or version.step != step:
            raise TransientError(
                f"version {step} of {job.run} is not loaded; load it, then evaluate"
            )
        return await self._cache.device.run(_evaluate, version.policy, job, rows)

    async def step(
        self,
        job: LearnerJob,
        batch: StepBatch,
        *,
        export_state: bool,
        export_weights: bool = True,
    ) -> StepResult:
        """Take one optimizer step from the loaded version `batch.step - 1`. The bytes of weights and
        optimizer state are in the result only if they are exported; the hash always is. Raises
        SamplesRefuted when samples fail their test, and the version stays loaded as it was. Raises
        TransientError when that version is not loaded, and Refused when memory runs out."""
        teacher = await self._load_teacher(job)
        version = self._loaded.get(job.run)
        if version is None or version.step != batch.step - 1:
            raise TransientError(
                f"version {batch.step - 1} of {job.run} is not loaded; load it, then step"
            )
        sampled = await self._cache.load_tensors(batch.sampled) if batch.sampled else None
        if self._loaded.get(job.run) is not version:
            raise TransientError(f"version {batch.step - 1} of {job.run} was replaced; step again")
        del self._loaded[job.run]
        exports = Exports(weights=export_weights, state=export_state)
        work = partial(_step, version, job, batch, teacher, sampled, exports)
        try:
            result = await self._run_on_device(job, work)
        except SamplesRefuted:
            self._loaded[job.run] = version
            raise
        assert result is not None  # noqa: S101 - only loading a version has none
        return result

    async def compare_gradients(
        self, job: LearnerJob, before: StepBatch, after: StepBatch
    ) -> GradientComparison:
        """Compare the policy gradients of two batches, which differ in their rewards, at the loaded
        version `before.step - 1`. It changes nothing. Raises TransientError when that is not loaded, and
        Refused for another algorithm than those that learn from advantages, or without memory."""
        version = self._loaded.get(job.run)
        if version is None or version.step != before.step - 1:
            raise TransientError(
                f"version {before.step - 1} of {job.run} is not loaded; load it, then compare"
            )
        try:
            return await self._cache.device.run(_compare_gradients, version, job, before, after)
        except torch.OutOfMemoryError as error:
            raise Refused(out_of_memory(job)) from error

    async def _load_teacher(self, job: LearnerJob) -> TeacherModel | None:
        """The teacher of a run that has one which is computed here, on the device. Raises Refused when
        it cannot be loaded."""
        if job.teacher is None or job.teacher.server is not None:
            return None
        loaded = (await self._cache.load_model(job.teacher.model)).under(job.rules)
        adapter = PolicyRef(version=0, weights=job.teacher.weights)
        return TeacherModel(job.teacher, loaded, await self._cache.load_tensors(adapter))

    async def _run_on_device(
        self, job: LearnerJob, work: "Callable[[], VersionAndResult]"
    ) -> StepResult | None:
        try:
            version, result, copies = await self._cache.device.run(work)
        except torch.OutOfMemoryError as error:
            raise Refused(out_of_memory(job)) from error
        self._loaded[job.run] = version
        while len(self._loaded) > self._max_runs:
            del self._loaded[next(iter(self._loaded))]
        if version.weights_file_sha256 is not None:
            self._cache.keep(version.weights_file_sha256, copies)
        if result is not None:
            result.versions.update(self._cache.device.versions)
        return result


VersionAndResult = tuple[LoadedVersion, StepResult | None, dict[str, torch.Tensor]]
"""The version to continue from, the result, and a copy of the trained tensors for samplers."""


@dataclass(frozen=True, slots=True)
class Exports:
    """Which bytes of a new version something needs."""

    weights: bool = True
    state: bool = True


def _build_version_zero(
    loaded: LoadedModel, job: LearnerJob, teacher: TeacherModel | None
) -> VersionAndResult:
    policy = fresh_policy(loaded, job)
    entropy = EntropyControl.fresh(job.config.advanced)
    version = LoadedVersion(policy, Optimizers.fresh(policy, job), entropy)
    if teacher is not None:
        teacher.check_vocabulary(loaded.base)
        version.teacher_sha256 = teacher.sha256
    state = _export(version, job, Exports())
    files, weights_name = checkpoint_files(policy, job)
    result = StepResult(
        state=state,
        metrics={},
        versions=_bit_versions(version, job),
        files=files,
        weights_name=weights_name,
    )
    return version, result, _copy(policy.tensors)


def _load_version(loaded: LoadedModel, job: LearnerJob, state: LearnerState) -> VersionAndResult:
    fresh = fresh_policy(loaded, job)
    device = loaded.base.model.device
    if state.weights is None:
        raise CorruptData(f"version {state.step} of {job.run} has no weights to continue from")
    tensors = parse(state.weights, device=device)
    check_fit(tensors, fresh.tensors)
    if state.state is None:
        raise CorruptData(
            f"version {state.step} of {job.run} has no optimizer state, which training needs to continue"
        )
    saved = parse(state.state, device=device)
    teacher_sha256, saved = read_hash(saved)
    critic = {n.removeprefix(CRITIC): t for n, t in saved.items() if n.startswith(CRITIC)}
    policy = replace(fresh, tensors=tensors)
    entropy = EntropyControl.fresh(job.config.advanced)
    if entropy is not None:
        entropy = load_control(saved)
        saved = {name: tensor for name, tensor in saved.items() if name not in (COEF, SEEN)}
    version = LoadedVersion(policy, Optimizers.fresh(policy, job), entropy)
    version.teacher_sha256 = teacher_sha256
    version.optimizers.policy.load({n: t for n, t in saved.items() if not n.startswith(CRITIC)})
    _load_critic(version, critic)
    if version.step != state.step:
        raise CorruptData(f"the optimizer state is of step {version.step}, not {state.step}")
    version.weights_sha256, version.state_sha256 = state.weights_sha256, state.state_sha256
    version.weights_file_sha256 = state.weights_file_sha256
    _check_hashes(version, job)
    return version, None, _copy(tensors)


def _check_hashes(version: LoadedVersion, job: LearnerJob) -> None:
    """Raises CorruptData unless the loaded tensors have the hash of the version. Before rules 7 this is
    the hash of the bytes, which was checked when they were read."""
    if job.rules < 7:
        return
    for what, tensors, expected in (
        ("weights", version.policy.tensors, version.weights_sha256),
        ("optimizer state", _optimizer_state(version), version.state_sha256),
    ):
        if (found := merkle_root(tensors)) != expected:
            raise CorruptData(
                f"the hash of the {what} of version {version.step} is {found[:16]}, and the log says "
                f"{expected[:16]}; bring the log and the blobs back from the same backup"
            )


def _load_critic(version: LoadedVersion, saved: dict[str, torch.Tensor]) -> None:
    critic, optimizer = version.policy.critic, version.optimizers.critic
    if critic is None or optimizer is None:
        check_fit(saved, {})
        return
    values = {name: tensor for name, tensor in saved.items() if name in critic.tensors}
    check_fit(values, critic.tensors, what="critic's weights")
    with torch.no_grad():
        for name, tensor in critic.tensors.items():
            tensor.copy_(values[name])
    optimizer.load({name: tensor for name, tensor in saved.items() if name not in values})


def _step(
    version: LoadedVersion,
    job: LearnerJob,
    batch: StepBatch,
    teacher: TeacherModel | None,
    sampled: dict[str, torch.Tensor] | None,
    exports: Exports,
) -> VersionAndResult:
    """Take one training step: `sft.step` for sft, `preferences.step` for every algorithm that learns
    from preferences, `distillation.step` for distill, and `grpo.step` for every algorithm that learns
    from advantages."""
    policy, advanced = version.policy, job.config.advanced
    tokens = advanced.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
    if advanced.algorithm == "sft":
        metrics, plan = sft.step(
            policy,
            version.optimizers,
            batch.conversations,
            chat=_chat(policy.loaded.base, job),
            advanced=advanced,
            micro_batch_tokens=tokens,
            rules=job.rules,
            step_size=step_size_at(batch.step, job),
        )
    elif advanced.algorithm in PREFERENCE_OBJECTIVES:
        metrics, plan = preferences.step(
            policy,
            version.optimizers,
            batch,
            _preference_run(policy.loaded.base, job),
            step_size=step_size_at(batch.step, job),
        )
    elif advanced.algorithm in DISTILLED:
        metrics, plan = distillation.step(
            policy,
            version.optimizers,
            batch.groups,
            _distillation_run(version, job, teacher),
            step_size=step_size_at(batch.step, job),
        )
    else:
        hyperparameters = _hyperparameters(version, job, step=batch.step, micro_batch_tokens=tokens)
        metrics, plan = grpo.step(
            policy,
            version.optimizers,
            batch.groups,
            objective=OBJECTIVES[advanced.algorithm],
            hyperparameters=hyperparameters,
            step_size=step_size_at(batch.step, job),
            witness=witness_of(policy, batch, hyperparameters, sampled=sampled),
        )
        if version.entropy is not None:
            metrics["train/entropy_coef"] = hyperparameters.entropy_coef
            version.entropy = version.entropy.after(metrics, advanced)
    version.optimizers.policy.step = batch.step
    metrics["train/tokens"] = float(sum(plan))
    finite = {key: value for key, value in sorted(metrics.items()) if math.isfinite(value)}
    state = _export(version, job, exports)
    versions = _bit_versions(version, job)
    result = StepResult(state=state, metrics=finite, plan=plan, versions=versions)
    return version, result, _copy(policy.tensors) if exports.weights else {}


def _compare_gradients(
    version: LoadedVersion, job: LearnerJob, before: StepBatch, after: StepBatch
) -> GradientComparison:
    if (algorithm := job.config.advanced.algorithm) not in REINFORCED:
        raise Refused(f"{algorithm} does not learn from advantages; compare no gradients")
    tokens = job.config.advanced.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
    return compare_gradients(
        version.policy,
        (before.groups, after.groups),
        objective=OBJECTIVES[algorithm],
        hyperparameters=_hyperparameters(version, job, step=before.step, micro_batch_tokens=tokens),
    )


def _hyperparameters(
    version: LoadedVersion, job: LearnerJob, *, step: int, micro_batch_tokens: int
) -> Hyperparameters:
    """Those of the run. If its entropy bonus follows a target, the weight is the version's."""
    found = hyperparameters_of(
        job.config, micro_batch_tokens=micro_batch_tokens, rules=job.rules, step=step
    )
    if version.entropy is None:
        return found
    return replace(found, entropy_coef=version.entropy.next_coef(job.config.advanced))


def _distillation_run(
    version: LoadedVersion, job: LearnerJob, teacher: TeacherModel | None
) -> distillation.DistillationRun:
    if teacher is not None:
        teacher.check_unchanged(version.teacher_sha256)
    tokens = job.config.advanced.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
    return distillation.run_of(
        job,
        teacher,
        student=version.policy,
        chat=_chat(version.policy.loaded.base, job),
        micro_batch_tokens=tokens,
    )


def _bit_versions(version: LoadedVersion, job: LearnerJob) -> dict[str, str]:
    """The things that the bits of a step depend on besides the versions of the device."""
    policy, teacher = version.policy, version.teacher_sha256
    gguf = policy.loaded.base.gguf_sha256
    return {
        "kernels": policy.kernels,
        "rules": str(job.rules),
        **({GGUF_VERSION: gguf} if gguf else {}),
        **({TEACHER_VERSION: teacher} if teacher else {}),
    }


def _chat(base: Base, job: LearnerJob) -> Chat:
    return Chat(base.tokenizer, base.stop_ids, date=job.date, apart=job.rules < 2)


def _preference_run(base: Base, job: LearnerJob) -> preferences.PreferenceRun:
    advanced = job.config.advanced
    return preferences.PreferenceRun(
        objective=PREFERENCE_OBJECTIVES[advanced.algorithm],
        settings=settings_of(advanced),
        chat=_chat(base, job),
        max_tokens=advanced.max_sequence_length,
        micro_batch_tokens=advanced.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS,
        temperature=1.0 if is_offline(advanced) else job.config.sampling.rollout_temperature,
    )


def _evaluate(policy: Policy, job: LearnerJob, rows: Sequence[LearnedRow]) -> dict[str, float]:
    advanced, base = job.config.advanced, policy.loaded.base
    tokens = advanced.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
    if advanced.algorithm in PREFERENCE:
        pairs = [row for row in rows if isinstance(row, Preference)]
        return preferences.evaluate(policy, pairs, _preference_run(base, job))
    return sft.evaluate(
        policy,
        [row for row in rows if isinstance(row, Conversation)],
        chat=_chat(base, job),
        advanced=advanced,
        micro_batch_tokens=tokens,
        rules=job.rules,
    )


def _export(version: LoadedVersion, job: LearnerJob, exports: Exports) -> LearnerState:
    """Hash a version, and serialise what something needs. Before rules 7 the hash is that of both files,
    so both are made."""
    trained, rest = version.policy.tensors, _optimizer_state(version)
    hashes_files = job.rules < 7
    weights = export(trained) if exports.weights or hashes_files else None
    state = export(rest) if exports.state or hashes_files else None
    with ThreadPoolExecutor(2, thread_name_prefix="hash") as pool:
        file_hashes = pool.map(_hash_file, (weights, state))
        roots = () if hashes_files else (merkle_root(trained), merkle_root(rest))
        weights_file, state_file = file_hashes
    version.weights_sha256, version.state_sha256 = roots or (weights_file, state_file)
    version.weights_file_sha256 = weights_file if exports.weights else None
    return LearnerState(
        step=version.step,
        weights=weights if exports.weights else None,
        weights_sha256=version.weights_sha256,
        state=state if exports.state else None,
        state_sha256=version.state_sha256,
        weights_file_sha256=version.weights_file_sha256,
        state_file_sha256=state_file if exports.state else None,
    )


def _hash_file(content: bytes | None) -> str:
    """The SHA-256 of a file. It is empty for one that nothing needs."""
    return "" if content is None else hashlib.sha256(content).hexdigest()


def _optimizer_state(version: LoadedVersion) -> dict[str, torch.Tensor]:
    """Everything that resume needs in addition to the weights."""
    state = version.optimizers.policy.state()
    critic, optimizer = version.policy.critic, version.optimizers.critic
    if critic is not None and optimizer is not None:
        inner = {**critic.tensors, **optimizer.state()}
        state |= {CRITIC + name: tensor for name, tensor in inner.items()}
    state |= write_hash(version.teacher_sha256)
    return state if version.entropy is None else state | version.entropy.state()


def _copy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
