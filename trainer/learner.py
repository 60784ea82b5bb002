"""The learner: (version, batch) -> version, deterministic by construction.

Nothing enters a step but the loaded tensors, the batch, the run's config and the step number: no
clock, no random draw, one thread count, deterministic kernels. A version is its weights' and its
optimizer state's bytes; loading them and stepping equals never having stopped, bit for bit.

One call at a time per run. A run's version is taken out of the table while it is stepped and put
back when the step is whole, so after a failure or a cancelled caller `holds` says no, and the
version is loaded again from its bytes.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from schemas.errors import CorruptData, Refused, TransientError
from schemas.learner import (
    Conversation,
    LearnerJob,
    LearnerState,
    StepBatch,
    StepResult,
)
from trainer import grpo
from trainer.algorithms import sft
from trainer.algorithms.registry import OBJECTIVES, hyperparameters_of
from trainer.model.base import Base
from trainer.model.chat_template import Chat
from trainer.optimizer import Optimizers, step_size_at
from trainer.policy import Loaded, Policy, check_fit, checkpoint_files, export, fresh_policy, parse
from trainer.weight_cache import Store

DEFAULT_MICRO_BATCH_TOKENS = 4096
CRITIC = "critic."
"""Prefix of the names of the critic's tensors, and of its optimizer's, in the state of a version."""


@dataclass(slots=True, eq=False)
class LoadedVersion:
    """A policy version on the device, which can be stepped from."""

    policy: Policy
    optimizers: Optimizers
    weights_sha256: str = ""
    state_sha256: str = ""

    @property
    def step(self) -> int:
        """The number of the version: how many steps led to it."""
        return self.optimizers.policy.step


class TorchLearner:
    """Takes optimizer steps on the device's thread (`schemas.learner.Learner`)."""

    def __init__(self, store: Store, *, max_runs: int = 2) -> None:
        self._store = store
        self._loaded: dict[str, LoadedVersion] = {}
        self._max_runs = max_runs

    async def initialize(self, job: LearnerJob) -> StepResult:
        """Build version 0. Raises Refused when the model cannot be loaded."""
        loaded = await self._store.loaded(job.model)
        result = await self._run(job, partial(_fresh_session, loaded, job))
        assert result is not None  # noqa: S101 - its work returns one
        return result

    def holds(self, job: LearnerJob, step: int, weights_sha256: str, state_sha256: str) -> bool:
        """Whether version `step` of this run, with these bits, can be stepped from."""
        version = self._loaded.get(job.run)
        return version is not None and (
            version.step,
            version.weights_sha256,
            version.state_sha256,
        ) == (step, weights_sha256, state_sha256)

    async def load(self, job: LearnerJob, state: LearnerState) -> None:
        """Load a version. Raises CorruptData when its tensors do not fit the model."""
        loaded = await self._store.loaded(job.model)
        await self._run(job, partial(_restored_session, loaded, job, state))

    async def evaluate(
        self, job: LearnerJob, step: int, conversations: Sequence[Conversation]
    ) -> dict[str, float]:
        """The held-out loss of the loaded version `step`. Raises TransientError when that version is
        not loaded, Refused for a conversation that cannot be learned."""
        version = self._loaded.get(job.run)
        if version is None or version.step != step:
            raise TransientError(f"version {step} of {job.run} is not loaded; it will be again")
        return await self._store.device.run(_evaluate, version.policy, job, conversations)

    async def step(self, job: LearnerJob, batch: StepBatch, *, export_state: bool) -> StepResult:
        """One optimizer step from the loaded version `batch.step - 1`. Raises TransientError when
        that version is not loaded."""
        version = self._loaded.get(job.run)
        if version is None or version.step != batch.step - 1:
            raise TransientError(
                f"version {batch.step - 1} of {job.run} is not loaded; load it, then step"
            )
        del self._loaded[job.run]
        work = partial(_step, version, job, batch, export_state=export_state)
        result = await self._run(job, work)
        assert result is not None  # noqa: S101 - its work returns one
        return result

    async def _run(self, job: LearnerJob, work: "Callable[[], Work]") -> StepResult | None:
        try:
            version, result, kept = await self._store.device.run(work)
        except torch.OutOfMemoryError as error:
            raise Refused(out_of_memory(job)) from error
        self._loaded[job.run] = version
        while len(self._loaded) > self._max_runs:
            del self._loaded[next(iter(self._loaded))]
        self._store.keep(version.weights_sha256, kept)
        if result is not None:
            result.versions.update(self._store.device.versions)
        return result


def out_of_memory(job: LearnerJob) -> str:
    """Which knobs there are when a step does not fit: its peak grows with a micro-batch's tokens."""
    advanced = job.config.advanced
    tokens = advanced.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
    longest = (
        f"advanced.max_sequence_length ({advanced.max_sequence_length})"
        if advanced.algorithm == "sft"
        else f"training.max_response_length ({job.config.training.max_response_length})"
    )
    full = "" if advanced.tuning == "lora" else "; advanced.tuning = 'lora' keeps far less"
    return (
        f"the learner's device ran out of memory: lower advanced.micro_batch_tokens (it is {tokens}), "
        f"then {longest}: a longer sample is a pass of its own{full}"
    )


Work = tuple[LoadedVersion, StepResult | None, dict[str, torch.Tensor]]
"""The version to go on from, the answer, and a copy of the trained tensors for samplers."""


def _fresh_session(loaded: Loaded, job: LearnerJob) -> Work:
    policy = fresh_policy(loaded, job)
    version = LoadedVersion(policy, Optimizers.fresh(policy, job))
    state = _export(version, export_state=True)
    files, weights_name = checkpoint_files(policy, job)
    result = StepResult(
        state=state,
        metrics={},
        versions=_bit_versions(policy, job),
        files=files,
        weights_name=weights_name,
    )
    return version, result, _copy(policy.tensors)


def _restored_session(loaded: Loaded, job: LearnerJob, state: LearnerState) -> Work:
    fresh = fresh_policy(loaded, job)
    device = loaded.base.model.device
    tensors = parse(state.weights, device=device)
    check_fit(tensors, fresh.tensors)
    if state.state is None:
        raise CorruptData(f"version {state.step} of {job.run} has no optimizer state to go on from")
    held = parse(state.state, device=device)
    critics = {n.removeprefix(CRITIC): t for n, t in held.items() if n.startswith(CRITIC)}
    policy = replace(fresh, tensors=tensors)
    version = LoadedVersion(policy, Optimizers.fresh(policy, job))
    version.optimizers.policy.load({n: t for n, t in held.items() if not n.startswith(CRITIC)})
    _restore_critic(version, critics)
    if version.step != state.step:
        raise CorruptData(f"the optimizer state is of step {version.step}, not {state.step}")
    version.weights_sha256, version.state_sha256 = state.weights_sha256, state.state_sha256
    return version, None, _copy(tensors)


def _restore_critic(version: LoadedVersion, held: dict[str, torch.Tensor]) -> None:
    critic, optimizer = version.policy.critic, version.optimizers.critic
    if critic is None or optimizer is None:
        check_fit(held, {})
        return
    values = {name: tensor for name, tensor in held.items() if name in critic.tensors}
    check_fit(values, critic.tensors, what="critic's weights")
    with torch.no_grad():
        for name, tensor in critic.tensors.items():
            tensor.copy_(values[name])
    optimizer.load({name: tensor for name, tensor in held.items() if name not in values})


def _step(version: LoadedVersion, job: LearnerJob, batch: StepBatch, *, export_state: bool) -> Work:
    """One step of the run's algorithm: `sft.step`, or `grpo.step` for all that learn from rewards."""
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
    else:
        metrics, plan = grpo.step(
            policy,
            version.optimizers,
            batch.groups,
            objective=OBJECTIVES[advanced.algorithm],
            hyperparameters=hyperparameters_of(
                job.config, micro_batch_tokens=tokens, rules=job.rules
            ),
            step_size=step_size_at(batch.step, job),
        )
    version.optimizers.policy.step = batch.step
    metrics["train/tokens"] = float(sum(plan))
    finite = {key: value for key, value in sorted(metrics.items()) if math.isfinite(value)}
    state = _export(version, export_state=export_state)
    versions = _bit_versions(policy, job)
    result = StepResult(state=state, metrics=finite, plan=plan, versions=versions)
    return version, result, _copy(policy.tensors)


def _bit_versions(policy: Policy, job: LearnerJob) -> dict[str, str]:
    """What the bits of a step depend on, beside the device's own."""
    return {"kernels": policy.kernels, "rules": str(job.rules)}


def _chat(base: Base, job: LearnerJob) -> Chat:
    return Chat(base.tokenizer, base.stop_ids, date=job.date, apart=job.rules < 2)


def _evaluate(
    policy: Policy, job: LearnerJob, conversations: Sequence[Conversation]
) -> dict[str, float]:
    advanced, base = job.config.advanced, policy.loaded.base
    tokens = advanced.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
    return sft.evaluate(
        policy,
        conversations,
        chat=_chat(base, job),
        advanced=advanced,
        micro_batch_tokens=tokens,
        rules=job.rules,
    )


def _export(version: LoadedVersion, *, export_state: bool) -> LearnerState:
    weights = export(version.policy.tensors)
    state = export(_state(version))
    version.weights_sha256 = hashlib.sha256(weights).hexdigest()
    version.state_sha256 = hashlib.sha256(state).hexdigest()
    return LearnerState(
        step=version.step,
        weights=weights,
        weights_sha256=version.weights_sha256,
        state=state if export_state else None,
        state_sha256=version.state_sha256,
    )


def _state(version: LoadedVersion) -> dict[str, torch.Tensor]:
    """Everything that resume needs beside the weights."""
    state = version.optimizers.policy.state()
    critic, optimizer = version.policy.critic, version.optimizers.critic
    if critic is not None and optimizer is not None:
        inner = {**critic.tensors, **optimizer.state()}
        state |= {CRITIC + name: tensor for name, tensor in inner.items()}
    return state


def _copy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
