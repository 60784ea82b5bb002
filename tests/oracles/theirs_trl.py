"""TRL: `GRPOTrainer`'s own methods, called unbound on a stand-in that supplies the numbers.

`_generate_and_score_completions` turns rewards into advantages and sampled log-probabilities into
corrections, `_compute_loss` makes the loss. Everything in between is TRL's: the stand-in generates
the case's rows, and its model answers with the case's log-probabilities. TRL builds some tensors in
torch's default type, which is float64 for the length of the call.
"""

import contextlib
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from tests.oracles.available import oracle
from tests.oracles.cases import Answer, Case, answer

TRAINER = oracle("trl.trainer.grpo_trainer").GRPOTrainer
GMPO = oracle("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer


class _Model(torch.nn.Module):
    is_gradient_checkpointing = False


class _Accelerator:
    device = torch.device("cpu")
    process_index = 0
    num_processes = 1
    sync_gradients = True

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def reduce(self, value: torch.Tensor, reduction: str) -> torch.Tensor:
        return value


class _Trainer:
    """The attributes of a trainer that the two methods read."""

    environment_factories = environments = tools = images = pad_to_multiple_of = None
    mask_truncated_completions = aux_loss_enabled = log_multimodal = use_liger_kernel = False
    _is_vlm = _entropy_bonus_enabled = False
    entropies: torch.Tensor | None = None
    num_iterations = 1
    top_entropy_quantile = 1.0
    current_gradient_accumulation_steps = 1
    multi_objective_aggregation = "sum_then_normalize"
    chat_template_kwargs: dict[str, Any] = {}
    get_off_policy_mask = staticmethod(TRAINER.get_off_policy_mask)

    def __init__(self, case: Case, settings: dict[str, Any]) -> None:
        self.case, self.now = case, case.proximal
        self.accelerator, self.model, self.ref_model = _Accelerator(), _Model().train(), _Model()
        self._tokenizer = types.SimpleNamespace(pad_token_id=0)
        self.num_generations = self.num_generations_eval = case.size
        self.parts: list[list[float]] = settings.pop("parts", [])
        self.reward_weights = torch.tensor(settings.pop("weights", [1.0]), dtype=torch.float64)
        self.reward_funcs = [None] * len(self.reward_weights)
        self.reward_func_names = [f"part {n}" for n in range(len(self.reward_weights))]
        self._metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._logs: Any = defaultdict(lambda: defaultdict(list))
        for name in ("prompt", "completion", "advantages", "images"):
            self._logs[name] = []
        self._pending_extra_logs: dict[str, list[Any]] = {}
        self._pending_metrics: dict[str, list[Any]] = {}
        self.args = types.SimpleNamespace(
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            per_device_train_batch_size=case.num_rows,
            gradient_checkpointing_kwargs=None,
            delta=settings.pop("delta", None),
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        )
        given = {
            "loss_type": "grpo",
            "scale_rewards": "group",
            "importance_sampling_level": "token",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "beta": 0.0,
            "off_policy_mask_threshold": None,
            "max_completion_length": case.mask.shape[1],
            "use_vllm": False,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_min": None,
            "vllm_importance_sampling_clip_max": None,
            **settings,
        }
        for name, value in given.items():
            setattr(self, name, value)

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        rows, width = self.case.mask.shape
        ids = [[1] * width for _ in range(rows)]
        masks = [[int(m) for m in row] for row in self.case.mask]
        logprobs = self.case.behaviour.tolist()
        return [[1]] * rows, ids, masks, [""] * rows, logprobs, {}, None, None

    def _calculate_rewards(self, *_: object) -> torch.Tensor:
        rewards = [
            reward if known else float("nan")
            for reward, known in zip(self.case.rewards, self.case.has_reward, strict=True)
        ]
        known = torch.tensor(rewards, dtype=torch.float64)[:, None]
        if not self.parts:
            return known
        parts = torch.tensor(self.parts, dtype=torch.float64).T
        return parts.masked_fill(known.isnan(), float("nan"))

    def _get_per_token_logps_and_entropies(self, model: object, *_: object, **__: Any) -> Any:
        logprobs = self.case.reference if model is self.ref_model else self.now
        entropies = torch.zeros_like(logprobs) if self.entropies is None else self.entropies
        return logprobs, entropies, None


@contextlib.contextmanager
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def score_batch(case: Case, **settings: Any) -> tuple[_Trainer, dict[str, torch.Tensor]]:
    """TRL's values for a batch before it trains: advantages and corrections."""
    trainer = _Trainer(case, settings)
    with _double():
        inputs = TRAINER._generate_and_score_completions(
            trainer, [{"prompt": ""} for _ in range(case.num_rows)]
        )
    return trainer, inputs


def loss(
    case: Case,
    advantage_B: torch.Tensor | None = None,
    *,
    against: torch.Tensor | None = None,
    kind: Any = TRAINER,
    **settings: Any,
) -> Answer:
    """TRL's loss of the case; `settings` are attributes of the trainer. The advantages are TRL's
    own unless given, and the ratio is taken against `against`, by default the sampler. `kind` is
    the trainer whose loss it is."""
    trainer, inputs = score_batch(case, **settings)
    inputs["old_per_token_logps"] = case.behaviour if against is None else against
    if advantage_B is not None:
        inputs["advantages"] = advantage_B

    def loss_of(now: torch.Tensor) -> torch.Tensor:
        trainer.now = now
        with _double():
            value: torch.Tensor = kind._compute_loss(trainer, trainer.model, inputs)
        return value

    return answer(case, loss_of)


def loss_with_entropy(
    case: Case, advantage_B: torch.Tensor, entropies: torch.Tensor, **settings: Any
) -> Answer:
    """TRL's loss with an entropy bonus. Its `value_gradient` is the one with respect to the entropies
    (B, T)."""
    leaf = entropies.clone().requires_grad_()
    given = {"entropies": leaf, "_entropy_bonus_enabled": True, "use_adaptive_entropy": False}
    found = loss(case, advantage_B, **{**given, **settings})
    return Answer(found.loss, found.gradient, leaf.grad)


def entropy_weights(
    case: Case, entropies: list[float], *, coef: float, target: float, delta: float, most: float
) -> list[tuple[float, float]]:
    """The weight of the bonus in steps with these entropies, and the one after each of them, as TRL's
    own loss moves it. The weight is minus the slope of the loss in the mean of the entropy."""
    scored, inputs = score_batch(
        case, loss_type="dapo", entropy_coef=coef, use_adaptive_entropy=True, entropies=case.now
    )
    trainer: Any = scored
    trainer._entropy_bonus_enabled, trainer._last_world_entropy = True, float("inf")
    trainer._entropy_window_stats = None
    trainer.args.entropy_target, trainer.args.entropy_coef_min = target, 0.0
    trainer.args.entropy_coef_delta, trainer.args.entropy_coef_max = delta, most
    inputs["old_per_token_logps"] = case.behaviour
    found = []
    for entropy in entropies:
        leaf = torch.full_like(case.now, entropy).requires_grad_()
        trainer.entropies = leaf
        with _double():
            TRAINER._compute_loss(trainer, trainer.model, inputs).backward()
        assert leaf.grad is not None
        found.append((-float(leaf.grad.sum()), trainer.entropy_coef))
    return found
