"""AdamW and Muon, their schedule, and their state as named tensors.

To resume, the learner needs the moments and the step count in addition to the weights, and nothing else.
The learning rate is a function of the step, and training draws no random numbers. So a step after
loading a state gives the same bits as it would have given without the interruption.

Weight decay applies to matrices only. Norms and biases have none, because pulling a gain or an offset
towards 0 does not regularise. The state is stored by name, so it does not depend on the parameter group
of a tensor.

With Muon (arXiv 2502.16982), the matrices of linear layers and adapters are updated by Muon. Embeddings,
the output head, that of a reward model, norms, biases and the critic are updated by AdamW, with the same
learning rate.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from schemas.algorithms import is_offline
from schemas.config import Advanced
from schemas.errors import CorruptData
from schemas.learner import LearnerJob
from trainer.model.scalar_heads import SCORE_NAME
from trainer.model.scalar_heads import WEIGHT as CRITIC_WEIGHT
from trainer.policy import Policy, check_fit

FIRST, SECOND, STEP = "exp_avg.", "exp_avg_sq.", "step"
MOMENTUM = "momentum."
MUON_MOMENTUM = 0.95
BETA2_RL, BETA2_OFFLINE = 0.95, 0.98

CRITIC_LR_RATIO = 10.0
"""The critic's learning rate is this many times the policy's, unless the run sets
`advanced.critic_lr`."""


def lr_at(step: int, *, total_steps: int, peak: float, advanced: Advanced) -> float:
    """The learning rate of step `step` (from 1). Warmup rises linearly and reaches the peak at
    `warmup_steps`. The decay starts at the step after that. It would reach `lr_min_ratio` one step past
    the last one, so that no step is wasted on a rate of 0."""
    warmup = min(advanced.warmup_steps, total_steps)
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))
    remaining = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[advanced.lr_schedule]
    floor = advanced.lr_min_ratio
    return peak * (floor + (1.0 - floor) * remaining)


@dataclass(frozen=True, slots=True)
class StepSize:
    """How far one update may move the weights: the learning rates of policy and critic, and the norm to
    which larger gradients are scaled down."""

    lr: float
    critic_lr: float
    grad_clip: float


def step_size_at(step: int, job: LearnerJob) -> StepSize:
    """The step size of step `step` (from 1) of a run."""
    training, advanced = job.config.training, job.config.advanced
    scheduled = partial(lr_at, step, total_steps=job.total_steps, advanced=advanced)
    critic_peak = advanced.critic_lr or CRITIC_LR_RATIO * training.lr
    return StepSize(
        lr=scheduled(peak=training.lr),
        critic_lr=scheduled(peak=critic_peak),
        grad_clip=advanced.grad_clip,
    )


def has_weight_decay(name: str, tensor: torch.Tensor) -> bool:
    """Whether weight decay applies to this tensor. True for the matrix of a linear layer, an embedding,
    an adapter and the critic's single row. False for the weight of a norm and for a bias."""
    *_, module, leaf = ("", *name.split("."))
    is_matrix = tensor.ndim > 1 or name == CRITIC_WEIGHT
    return is_matrix and not leaf.endswith("bias") and "norm" not in module.lower()


def global_norm(gradients: list[torch.Tensor]) -> float:
    """The 2-norm over all gradients together, and 0 without gradients. The order of the gradients
    changes its last bits, so it must be fixed."""
    if not gradients:
        return 0.0
    return float(torch.stack(torch._foreach_norm(gradients)).double().norm())


@dataclass(slots=True, eq=False)
class Optimizer:
    """AdamW over named leaf tensors, and Muon over those that `matrices` names. `step` is the number of
    the policy version that their moments belong to."""

    tensors: dict[str, torch.Tensor]
    adam: torch.optim.AdamW
    step: int = 0
    muon: torch.optim.Muon | None = None
    matrices: frozenset[str] = frozenset()

    @classmethod
    def fresh(
        cls,
        tensors: dict[str, torch.Tensor],
        job: LearnerJob,
        *,
        matrices: frozenset[str] = frozenset(),
    ) -> "Optimizer":
        """An optimizer without moments. Makes the tensors require gradients."""
        advanced = job.config.advanced
        default = BETA2_OFFLINE if is_offline(advanced) else BETA2_RL
        beta2 = default if advanced.adam_beta2 is None else advanced.adam_beta2
        adam = torch.optim.AdamW(
            _groups({n: t for n, t in tensors.items() if n not in matrices}, job),
            lr=job.config.training.lr,
            betas=(advanced.adam_beta1, beta2),
            eps=1e-8,
            fused=True,
        )
        muon = _muon({name: tensors[name] for name in matrices}, job) if matrices else None
        return cls(tensors, adam, muon=muon, matrices=matrices)

    def gradient_norm(self) -> float:
        """The 2-norm of the accumulated gradients."""
        return global_norm(self._gradients())

    def update(self, *, lr: float, clip: float, is_finite: bool = True) -> float:
        """Clip the accumulated gradients to the norm `clip`, take one step, and clear them.
        Returns their norm before clipping. The step is left out when they are not finite, or when
        `is_finite` is False. The caller passes that when the gradients of another optimizer are not
        finite."""
        gradients = self._gradients()
        norm = global_norm(gradients)
        if is_finite and gradients and math.isfinite(norm):
            if norm > clip:
                torch._foreach_mul_(gradients, clip / norm)
            for part in self._parts():
                for group in part.param_groups:
                    group["lr"] = lr
                part.step()
        for part in self._parts():
            part.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, torch.Tensor]:
        """The state as named tensors: the version's number, and both moments and the number of updates
        of each tensor, or the momentum of a matrix of Muon. Moments that do not exist yet are zeros."""
        state: dict[str, torch.Tensor] = {STEP: torch.tensor(self.step)}
        for name, tensor in self.tensors.items():
            if self.muon is not None and name in self.matrices:
                held = self.muon.state.get(tensor, {})
                state[MOMENTUM + name] = held.get("momentum_buffer", torch.zeros_like(tensor))
                continue
            moments = self.adam.state.get(tensor, {})
            num_updates = moments.get("step", torch.tensor(0.0))
            state[f"{STEP}.{name}"] = num_updates.detach().cpu().to(torch.float32)
            state[FIRST + name] = moments.get("exp_avg", torch.zeros_like(tensor))
            state[SECOND + name] = moments.get("exp_avg_sq", torch.zeros_like(tensor))
        return state

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what `state` returned. Raises CorruptData when it does not fit the tensors."""
        if STEP not in state:
            raise CorruptData("the optimizer state has no step count")
        moments = {name: tensor for name, tensor in state.items() if name != STEP}
        rest = {n: t for n, t in self.tensors.items() if n not in self.matrices}
        shapes = {MOMENTUM + n: self.tensors[n] for n in self.matrices}
        shapes |= {FIRST + n: t for n, t in rest.items()}
        shapes |= {SECOND + n: t for n, t in rest.items()}
        shapes |= {f"{STEP}.{n}": torch.tensor(0.0) for n in rest}
        check_fit(moments, shapes, what="optimizer's moments")
        self.step = int(state[STEP])
        if self.muon is not None:
            for name in self.matrices:
                self.muon.state[self.tensors[name]] = {"momentum_buffer": moments[MOMENTUM + name]}
        for name, tensor in rest.items():
            self.adam.state[tensor] = {
                # PyTorch wants the count of a fused optimizer where the tensor is.
                "step": moments[f"{STEP}.{name}"].to(tensor.device),
                "exp_avg": moments[FIRST + name],
                "exp_avg_sq": moments[SECOND + name],
            }

    def _parts(self) -> list[torch.optim.Optimizer]:
        return [self.adam] if self.muon is None else [self.adam, self.muon]

    def _gradients(self) -> list[torch.Tensor]:
        ordered = [self.tensors[name] for name in sorted(self.tensors)]
        return [t.grad for t in ordered if t.grad is not None]


def _groups(tensors: Mapping[str, torch.Tensor], job: LearnerJob) -> list[dict[str, Any]]:
    """Parameter groups by weight decay. Makes the tensors require gradients. Under rules 1 weight decay
    applies to every tensor."""
    decay = job.config.advanced.weight_decay
    groups: dict[float, list[torch.Tensor]] = {}
    for name in sorted(tensors):
        own = decay if job.rules < 2 or has_weight_decay(name, tensors[name]) else 0.0
        groups.setdefault(own, []).append(tensors[name].requires_grad_())
    found = [{"params": params, "weight_decay": own} for own, params in groups.items()]
    return found or [{"params": []}]


def _muon(tensors: Mapping[str, torch.Tensor], job: LearnerJob) -> torch.optim.Muon:
    """Muon, with updates as large as those of AdamW: their root mean square is about 0.2 lr."""
    advanced = job.config.advanced
    momentum = advanced.muon_momentum
    return torch.optim.Muon(
        _groups(tensors, job),
        lr=job.config.training.lr,
        momentum=MUON_MOMENTUM if momentum is None else momentum,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )


def muon_matrices(policy: Policy) -> frozenset[str]:
    """The trained tensors that Muon updates: the matrices of linear layers and adapters. A row of an
    embedding or of the output head belongs to a token, so these are not multiplied as matrices are. The
    head of a reward model is a single row."""
    model = policy.loaded.base.model
    head = model.get_output_embeddings()
    tables = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or module is head
    }
    tables.add(SCORE_NAME)
    return frozenset(n for n, t in policy.tensors.items() if t.ndim == 2 and n not in tables)


@dataclass(slots=True, eq=False)
class Optimizers:
    """The optimizer of a policy, and that of its critic if it has one."""

    policy: Optimizer
    critic: Optimizer | None = None

    @classmethod
    def fresh(cls, policy: Policy, job: LearnerJob) -> "Optimizers":
        """Optimizers without moments. Makes the tensors of policy and critic require gradients."""
        critic = policy.critic
        has_muon = job.config.advanced.optimizer == "muon"
        matrices = muon_matrices(policy) if has_muon else frozenset()
        return cls(
            Optimizer.fresh(policy.tensors, job, matrices=matrices),
            Optimizer.fresh(critic.tensors, job) if critic else None,
        )

    def update(self, step_size: StepSize, *, loss: float) -> dict[str, float]:
        """Update policy and critic with the accumulated gradients, and clear these. If `loss` or any
        gradient is not finite, neither policy nor critic changes, and "train/skipped" is 1. Returns the
        metrics by key; gradient norms are those before clipping."""
        critic, clip = self.critic, step_size.grad_clip
        is_finite = math.isfinite(loss) and (
            critic is None or math.isfinite(self.policy.gradient_norm() + critic.gradient_norm())
        )
        norm = self.policy.update(lr=step_size.lr, clip=clip, is_finite=is_finite)
        metrics = {
            "train/lr": step_size.lr,
            "train/grad_norm": norm,
            "train/skipped": 0.0 if is_finite and math.isfinite(norm) else 1.0,
        }
        if critic is not None:
            metrics["train/critic_grad_norm"] = critic.update(
                lr=step_size.critic_lr, clip=clip, is_finite=is_finite
            )
        return metrics

    def clear_gradients(self) -> None:
        """Drop the accumulated gradients of policy and critic."""
        for one in self._all():
            for tensor in one.tensors.values():
                tensor.grad = None

    def snapshot(self) -> "OptimizerSnapshot":
        """Copies of the tensors and the state of policy and critic."""
        return [
            (
                {name: tensor.detach().clone() for name, tensor in one.tensors.items()},
                {name: tensor.clone() for name, tensor in one.state().items()},
            )
            for one in self._all()
        ]

    def restore(self, snapshot: "OptimizerSnapshot") -> None:
        """Take everything back to a snapshot."""
        for one, (tensors, state) in zip(self._all(), snapshot, strict=True):
            with torch.no_grad():
                for name, tensor in one.tensors.items():
                    tensor.copy_(tensors[name])
            one.load(state)

    def _all(self) -> list[Optimizer]:
        return [self.policy] if self.critic is None else [self.policy, self.critic]


OptimizerSnapshot = list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]
"""The tensors and the state of each optimizer."""
