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
    GradedGroup,
    LearnerJob,
    LearnerState,
    StepBatch,
    StepResult,
)
from trainer.algorithms import sft
from trainer.algorithms.registry import OBJECTIVES, settings_of
from trainer.model.base import Base
from trainer.model.chat_template import Chat
from trainer.optimizer import Optimizer, lr_at
from trainer.policy import Loaded, Policy, check_fit, checkpoint_files, export, fresh_policy, parse
from trainer.step import Batch, accumulate, prepare
from trainer.weight_cache import Store

DEFAULT_MICRO_BATCH_TOKENS = 4096
CRITIC = "critic."
"""Begins the names of the critic's tensors, and of its optimizer's, in a version's state."""

CRITIC_LR_RATIO = 10.0
"""The critic's learning rate over the policy's, unless the run says what it is."""


@dataclass(slots=True, eq=False)
class Session:
    """A run's loaded version. `critic_optimizer` where the policy has a critic."""

    policy: Policy
    optimizer: Optimizer
    critic_optimizer: Optimizer | None = None
    weights_sha256: str = ""
    state_sha256: str = ""

    @classmethod
    def of(cls, policy: Policy, job: LearnerJob) -> "Session":
        """Fresh optimizers over a policy's tensors."""
        critic = policy.critic
        return cls(
            policy,
            Optimizer.fresh(policy.tensors, job),
            Optimizer.fresh(critic.tensors, job) if critic else None,
        )


class TorchLearner:
    """Takes optimizer steps on the device's thread (`schemas.learner.Learner`)."""

    def __init__(self, store: Store, *, max_runs: int = 2) -> None:
        self._store = store
        self._sessions: dict[str, Session] = {}
        self._max_runs = max_runs

    async def initialize(self, job: LearnerJob) -> StepResult:
        """Build version 0. Raises Refused when the model cannot be loaded."""
        loaded = await self._store.loaded(job.model)
        result = await self._run(job, partial(_fresh_session, loaded, job))
        assert result is not None  # noqa: S101 - its work returns one
        return result

    def holds(self, job: LearnerJob, step: int, weights_sha256: str, state_sha256: str) -> bool:
        """Whether version `step` of this run, with these bits, can be stepped from."""
        session = self._sessions.get(job.run)
        return session is not None and (
            session.optimizer.step,
            session.weights_sha256,
            session.state_sha256,
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
        session = self._sessions.get(job.run)
        if session is None or session.optimizer.step != step:
            raise TransientError(f"version {step} of {job.run} is not loaded; it will be again")
        return await self._store.device.run(_evaluate, session.policy, job, conversations)

    async def step(self, job: LearnerJob, batch: StepBatch, *, export_state: bool) -> StepResult:
        """One optimizer step from the loaded version `batch.step - 1`. Raises TransientError when
        that version is not loaded."""
        session = self._sessions.get(job.run)
        if session is None or session.optimizer.step != batch.step - 1:
            raise TransientError(
                f"version {batch.step - 1} of {job.run} is not loaded; load it, then step"
            )
        del self._sessions[job.run]
        work = partial(_step, session, job, batch, export_state=export_state)
        result = await self._run(job, work)
        assert result is not None  # noqa: S101 - its work returns one
        return result

    async def _run(self, job: LearnerJob, work: "Callable[[], Work]") -> StepResult | None:
        try:
            session, result, kept = await self._store.device.run(work)
        except torch.OutOfMemoryError as error:
            raise Refused(out_of_memory(job)) from error
        self._sessions[job.run] = session
        while len(self._sessions) > self._max_runs:
            del self._sessions[next(iter(self._sessions))]
        self._store.keep(session.weights_sha256, kept)
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


Work = tuple[Session, StepResult | None, dict[str, torch.Tensor]]
"""The session to go on from, the answer, and a copy of the trained tensors for samplers."""


def _fresh_session(loaded: Loaded, job: LearnerJob) -> Work:
    policy = fresh_policy(loaded, job)
    session = Session.of(policy, job)
    state = _export(session, export_state=True)
    files, weights_name = checkpoint_files(policy, job)
    result = StepResult(
        state=state,
        metrics={},
        versions=_versions(policy, job),
        files=files,
        weights_name=weights_name,
    )
    return session, result, _copy(policy.tensors)


def _restored_session(loaded: Loaded, job: LearnerJob, state: LearnerState) -> Work:
    fresh = fresh_policy(loaded, job)
    device = loaded.base.model.device
    tensors = parse(state.weights, device=device)
    check_fit(tensors, fresh.tensors)
    if state.state is None:
        raise CorruptData(f"version {state.step} of {job.run} has no optimizer state to go on from")
    held = parse(state.state, device=device)
    critics = {n.removeprefix(CRITIC): t for n, t in held.items() if n.startswith(CRITIC)}
    session = Session.of(replace(fresh, tensors=tensors), job)
    session.optimizer.load({n: t for n, t in held.items() if not n.startswith(CRITIC)})
    _restore_critic(session, critics)
    if session.optimizer.step != state.step:
        raise CorruptData(
            f"the optimizer state is of step {session.optimizer.step}, not {state.step}"
        )
    session.weights_sha256, session.state_sha256 = state.weights_sha256, state.state_sha256
    return session, None, _copy(tensors)


def _restore_critic(session: Session, held: dict[str, torch.Tensor]) -> None:
    critic, optimizer = session.policy.critic, session.critic_optimizer
    if critic is None or optimizer is None:
        check_fit(held, {})
        return
    values = {name: tensor for name, tensor in held.items() if name in critic.tensors}
    check_fit(values, critic.tensors, what="critic's weights")
    with torch.no_grad():
        for name, tensor in critic.tensors.items():
            tensor.copy_(values[name])
    optimizer.load({name: tensor for name, tensor in held.items() if name not in values})


def _step(session: Session, job: LearnerJob, batch: StepBatch, *, export_state: bool) -> Work:
    config, policy = job.config, session.policy
    advanced = config.advanced
    tokens = advanced.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
    if advanced.algorithm == "sft":
        base = policy.loaded.base
        metrics, plan = sft.step(
            policy,
            _chat(base, job),
            batch.conversations,
            advanced,
            tokens=tokens,
            rules=job.rules,
        )
        metrics |= _update(session, job, batch.step)
    else:
        settings = settings_of(config, micro_batch_tokens=tokens, rules=job.rules)
        ready = prepare(policy, batch.groups, OBJECTIVES[advanced.algorithm], settings)
        metrics, plan = _updates(session, job, ready, batch.step)
        metrics |= rollout_metrics(batch.groups)
    session.optimizer.step = batch.step
    metrics["train/tokens"] = float(sum(plan))
    finite = {key: value for key, value in sorted(metrics.items()) if math.isfinite(value)}
    state = _export(session, export_state=export_state)
    versions = _versions(policy, job)
    result = StepResult(state=state, metrics=finite, plan=plan, versions=versions)
    return session, result, _copy(policy.tensors)


def _versions(policy: Policy, job: LearnerJob) -> dict[str, str]:
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
        policy, _chat(base, job), conversations, advanced, tokens=tokens, rules=job.rules
    )


def _updates(
    session: Session, job: LearnerJob, ready: Batch, step: int
) -> tuple[dict[str, float], tuple[int, ...]]:
    """All updates on one batch; one that is not finite is the last, the next would be as it was.
    Metrics are means over the updates."""
    seen: list[dict[str, float]] = []
    plan: tuple[int, ...] = ()
    for _ in range(ready.settings.updates):
        metrics, plan = accumulate(session.policy, ready)
        seen.append(metrics | _update(session, job, step))
        if seen[-1]["train/skipped"]:
            break
    means = {key: math.fsum(m[key] for m in seen) / len(seen) for key in seen[0]}
    return means | {"train/skipped": seen[-1]["train/skipped"]}, plan


def _update(session: Session, job: LearnerJob, step: int) -> dict[str, float]:
    """The optimizers take the gradients at hand, all of them or none."""
    training, advanced = job.config.training, job.config.advanced
    rate = partial(lr_at, step, total_steps=job.total_steps, advanced=advanced)
    lr = rate(peak=training.lr)
    critic = session.critic_optimizer
    healthy = critic is None or math.isfinite(session.optimizer.norm() + critic.norm())
    norm = session.optimizer.take(lr=lr, clip=advanced.grad_clip, healthy=healthy)
    metrics = {
        "train/lr": lr,
        "train/grad_norm": norm,
        "train/skipped": 0.0 if healthy and math.isfinite(norm) else 1.0,
    }
    if critic is not None:
        critic_lr = rate(peak=advanced.critic_lr or CRITIC_LR_RATIO * training.lr)
        metrics["train/critic_grad_norm"] = critic.take(
            lr=critic_lr, clip=advanced.grad_clip, healthy=healthy
        )
    return metrics


def rollout_metrics(groups: Sequence[GradedGroup]) -> dict[str, float]:
    """What the samples of a batch say about their own lengths. Empty without samples."""
    samples = [s for group in groups for s in group.samples if s.failure is None]
    if not samples:
        return {}
    lengths = [sum(sum(row.loss_mask) for row in s.sequences) for s in samples]
    totals = [sum(len(row.tokens) for row in s.sequences) for s in samples]
    return {
        "rollout/response_lengths": sum(lengths) / len(samples),
        "rollout/total_lengths": sum(totals) / len(samples),
        "rollout/truncated_ratio": sum(s.truncated for s in samples) / len(samples),
    }


def _export(session: Session, *, export_state: bool) -> LearnerState:
    weights = export(session.policy.tensors)
    state = export(_state(session))
    session.weights_sha256 = hashlib.sha256(weights).hexdigest()
    session.state_sha256 = hashlib.sha256(state).hexdigest()
    return LearnerState(
        step=session.optimizer.step,
        weights=weights,
        weights_sha256=session.weights_sha256,
        state=state if export_state else None,
        state_sha256=session.state_sha256,
    )


def _state(session: Session) -> dict[str, torch.Tensor]:
    """Everything that resume needs beside the weights."""
    state, critic = session.optimizer.state(), session.policy.critic
    if critic is not None and session.critic_optimizer is not None:
        inner = {**critic.tensors, **session.critic_optimizer.state()}
        state |= {CRITIC + name: tensor for name, tensor in inner.items()}
    return state


def _copy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
