"""A policy: a frozen base model and the tensors that are trained on top of it.

With LoRA the trained tensors are those of the adapter. With full tuning they are all weights of the
model. In both cases they have the names that Transformers and PEFT use, so an export only serialises
them. The bytes are deterministic, because safetensors orders tensors by name and the metadata is fixed.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save

from schemas.config import Advanced
from schemas.errors import CorruptData, Refused
from schemas.learner import RULES, LearnerJob
from trainer.forward.decoder import Decoder
from trainer.forward.fused_pass import can_fuse, fused_hidden
from trainer.forward.lm_head import logits_of
from trainer.forward.logprobs import chosen_logprobs, likeliest_tokens
from trainer.forward.ops import DIRECT, Forward
from trainer.forward.packing import MicroBatch, packed_attend
from trainer.forward.predictions import Predictions
from trainer.forward.spans import spans_of
from trainer.forward.transformers_pass import Fallback
from trainer.forward.varlen_attention import varlen_attend
from trainer.forward.weights import Trainable, trainable_view
from trainer.model.base import ADAPTER_CONFIG, ADAPTER_NAME, Base
from trainer.model.lora import adapter_config, fresh_adapter, target_modules
from trainer.model.lora_names import Scaling, Tensors
from trainer.model.safetensors_view import view_tensors
from trainer.model.scalar_heads import SCORE, Critic, fresh_critic, fresh_score_head, scores
from trainer.native.interface import LearnerPass, learner_pass, product

METADATA = {"format": "pt"}
MODEL_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A base model that is ready to run. It runs on our own decoder if that supports the model's
    family, and through Transformers (`fallback`) otherwise."""

    base: Base
    decoder: Decoder | None
    fallback: Fallback

    def under(self, rules: int) -> "LoadedModel":
        """The model as a run computes it that started with these rules (`schemas.learner.RULES`). The
        decoder took fewer models before, and a run keeps the pass that it started with."""
        is_later = self.decoder is not None and rules < self.decoder.since_rules
        return replace(self, decoder=None) if is_later else self


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A version of a model. `tensors` are leaf tensors, which require gradients while a learner owns
    them. `scaling` is that of the adapter. `forward` says how its passes are computed.

    Shape suffixes: N all packed tokens of a micro-batch, M its actions, R its rows, H hidden, V
    vocabulary, K likeliest tokens.
    """

    loaded: LoadedModel
    tensors: dict[str, torch.Tensor]
    scaling: Scaling
    critic: Critic | None = None
    forward: Forward = DIRECT

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def kernels(self) -> str:
        """Which kernels run the passes. The bits depend on it. The value is `torch`, or the name of the
        compiled pass, which depends on its source, the compiler and the processor."""
        decoder = self.loaded.decoder
        if decoder is None:
            return "torch"
        weights = trainable_view(self.loaded.base.tensors, self.tensors, scaling=self.scaling)
        native = self._native_pass(decoder, weights)
        return "torch" if native is None else native.kernels

    @property
    def shares_prompts(self) -> bool:
        """Whether the samples of a group can be packed as a tree, with their shared prompt only once.
        Only our own decoder supports the attention mask that this needs."""
        return self.loaded.decoder is not None

    @property
    def shares_prefixes(self) -> bool:
        """Whether such a tree shares all that rows begin with (`trainer/forward/prefix_tree.py`)."""
        return self.shares_prompts and self.forward.shares_prefixes

    def outputs(
        self, micro: MicroBatch, *, reference: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states (M, H) that predict each action, and the logits (M, V) computed from them.
        With `reference`, the pass uses the base model without the trained tensors."""
        decoder = self.loaded.decoder
        if decoder is None:
            trained: Tensors = {} if reference else self.tensors
            padding = self.forward.trains_padding
            fallback = self.loaded.fallback
            return fallback.outputs(trained, micro, scaling=self.scaling, trains_padding=padding)
        hidden_M_H, head_V_H = self._lean_states(decoder, micro, reference=reference)
        return hidden_M_H, logits_of(hidden_M_H, head_V_H)

    def _hidden_states(
        self, micro: MicroBatch, *, reference: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The hidden states (M, H) that predict each action, and the weight (V, H) of the output head.
        None where logits are more than their product (`outputs` has them), and under rules 5 for all
        models that run through Transformers."""
        decoder, fallback = self.loaded.decoder, self.loaded.fallback
        if decoder is not None:
            return self._lean_states(decoder, micro, reference=reference)
        if not (self.forward.chunks_general_logits and fallback.has_plain_head):
            return None
        return fallback.hidden_states(
            {} if reference else self.tensors, micro, scaling=self.scaling
        )

    def _lean_states(
        self, decoder: Decoder, micro: MicroBatch, *, reference: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        trained: Tensors = {} if reference else self.tensors
        weights = trainable_view(self.loaded.base.tensors, trained, scaling=self.scaling)
        hidden_N_H = self._all_hidden_states(decoder, weights, micro)
        return hidden_N_H.index_select(0, micro.predictor_M), decoder.head(weights)

    def _all_hidden_states(
        self, decoder: Decoder, weights: Trainable, micro: MicroBatch
    ) -> torch.Tensor:
        """The hidden states (N, H) of all packed tokens."""
        tokens = (micro.tokens_N, micro.positions_N)
        if (native := self._native_pass(decoder, weights)) is not None:
            return native.hidden_states(*tokens, micro.segments)
        if micro.blocks:
            attend = packed_attend(micro, kv_heads=decoder.kv_heads, windows=decoder.windows)
        else:
            spans = spans_of(micro.segments, device=micro.tokens_N.device)
            attend = varlen_attend(
                spans, compiled=self.forward.fuses_attention, windows=decoder.windows
            )
        fused = can_fuse(decoder, weights, num_bytes=self.loaded.base.num_bytes)
        run = partial(fused_hidden, decoder) if fused else decoder.hidden_states
        return run(weights, *tokens, attend, self.forward)

    def _native_pass(self, decoder: Decoder, weights: Trainable) -> LearnerPass | None:
        """The pass in C, or None where this version must run through torch."""
        if not self.forward.allows_native or self.forward.recompute:
            return None
        is_small = can_fuse(decoder, weights, num_bytes=self.loaded.base.num_bytes)
        takes_wide = self.forward.allows_wide_native and is_small
        return learner_pass(decoder, weights, takes_wide=takes_wide)

    def predictions(self, micro: MicroBatch) -> Predictions:
        """The predictions in the place of each action, with a gradient."""
        states = self._hidden_states(micro, reference=False)
        return Predictions(self.outputs(micro)[1]) if states is None else Predictions(*states)

    def logits(self, micro: MicroBatch, *, reference: bool = False) -> torch.Tensor:
        """The logits (M, V) that predict each action."""
        return self.outputs(micro, reference=reference)[1]

    def logprobs(
        self,
        micro: MicroBatch,
        *,
        temperature: float,
        reference: bool = False,
        trains_entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probability (M) of each action at `temperature`, and the entropy (M, in nats) of the
        distribution that the action was drawn from. The entropy has a gradient with `trains_entropy`
        only, which costs memory for one more chunk of logits."""
        return self._score_actions(
            micro, temperature=temperature, reference=reference, trains_entropy=trains_entropy
        )[:2]

    @torch.no_grad()
    def likeliest(
        self, micro: MicroBatch, *, temperature: float, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids (M, K) of the `most` likeliest tokens in the place of each action, the likeliest
        first, and their log-probabilities (M, K) at `temperature` (`likeliest_tokens`)."""
        states = self._hidden_states(micro, reference=False)
        if states is None:
            logits_M_V = _restrict(self.outputs(micro)[1] / temperature, micro)
            logprobs_M_V = F.log_softmax(logits_M_V, dim=-1)
            found = logprobs_M_V.topk(min(most, logits_M_V.shape[-1]), dim=-1)
            return found.indices, found.values
        return likeliest_tokens(*states, temperature=temperature, most=most, allowed=micro.allowed)

    def logprobs_and_values(
        self, micro: MicroBatch, *, temperature: float, trains_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same as `logprobs`, and the value (M) that the critic predicts before each action. Raises
        ValueError if the policy has no critic."""
        if self.critic is None:
            raise ValueError("this policy has no critic: only algorithm 'ppo' makes one")
        logprob_M, entropy_M, hidden_M_H = self._score_actions(
            micro, temperature=temperature, reference=False, trains_entropy=trains_entropy
        )
        return logprob_M, entropy_M, self.critic.values(hidden_M_H)

    def scores(self, micro: MicroBatch) -> torch.Tensor:
        """The reward (R) of each row: that of the score head at its last token. Raises KeyError if the
        policy has no head."""
        hidden_R_H = self._last_hidden_states(micro)
        return scores(self.tensors, hidden_R_H)

    def _last_hidden_states(self, micro: MicroBatch) -> torch.Tensor:
        """The hidden state (R, H) of the last token of each row."""
        at_last = replace(micro, predictor_M=micro.last_R)
        states = self._hidden_states(at_last, reference=False)
        return self.outputs(at_last)[0] if states is None else states[0]

    def _score_actions(
        self, micro: MicroBatch, *, temperature: float, reference: bool, trains_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities (M), entropies (M) and hidden states (M, H). Logits are computed in chunks,
        unless Transformers' module does more than the product with its head."""
        states = self._hidden_states(micro, reference=reference)
        if states is None:
            hidden_M_H, logits_M_V = self.outputs(micro, reference=reference)
            return *_target_logprobs(
                _restrict(logits_M_V / temperature, micro),
                micro.target_M,
                trains_entropy=trains_entropy,
            ), hidden_M_H
        hidden_M_H, head_V_H = states
        chosen = chosen_logprobs(
            hidden_M_H,
            head_V_H,
            micro.target_M,
            temperature=temperature,
            chunk_elements=self.forward.chunk_elements(hidden_M_H.device),
            kept_elements=self.forward.kept_elements(hidden_M_H.device),
            trains_entropy=trains_entropy,
            logits=_head_product,
            allowed=micro.allowed,
        )
        return *chosen, hidden_M_H


def _head_product(hidden_C_H: torch.Tensor, head_V_H: torch.Tensor) -> torch.Tensor:
    """`logits_of`, faster for a chunk of a large vocabulary on a CPU."""
    is_plain = hidden_C_H.dtype == torch.float32 and hidden_C_H.device.type == "cpu"
    return product(hidden_C_H, head_V_H.t()) if is_plain else logits_of(hidden_C_H, head_V_H)


def _restrict(logits_M_V: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    return logits_M_V if micro.allowed is None else micro.allowed.restrict(logits_M_V)


def _target_logprobs(
    logits_M_V: torch.Tensor, target_M: torch.Tensor, *, trains_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    all_M_V = F.log_softmax(logits_M_V, dim=-1)
    with torch.set_grad_enabled(trains_entropy and torch.is_grad_enabled()):
        entropy_M = -(all_M_V.exp() * all_M_V).sum(dim=-1)
    return all_M_V.gather(-1, target_M[:, None])[:, 0], entropy_M


def fresh_policy(loaded: LoadedModel, job: LearnerJob) -> Policy:
    """Version 0 of a run's policy: a fresh adapter from the seed, or with full tuning a trainable copy
    of all base weights. For PPO it also has a critic, which predicts 0, and a reward model has a score
    head. Raises Refused when the model does not support what the config asks for."""
    advanced, loaded = job.config.advanced, loaded.under(job.rules)
    forward = forward_of(loaded, advanced, rules=job.rules)
    critic = fresh_critic(loaded.base) if advanced.algorithm == "ppo" else None
    scaling = Scaling(advanced.lora_alpha, advanced.lora_scaling)
    if advanced.tuning == "full":
        tensors = {n: _trainable_copy(p) for n, p in loaded.base.parameters.items()}
        return Policy(loaded, tensors, scaling, critic, forward)
    modules = target_modules(loaded.base, advanced.lora_targets)
    tensors = fresh_adapter(
        loaded.base,
        modules,
        rank=advanced.lora_rank,
        seed=advanced.seed,
        is_dora=advanced.lora_variant == "dora",
    )
    if advanced.algorithm == "reward_model":
        tensors |= fresh_score_head(loaded.base, seed=advanced.seed)
    return Policy(loaded, tensors, scaling, critic, forward)


def _trainable_copy(parameter: torch.Tensor) -> torch.Tensor:
    """A copy to train. It is at least fp32, because a 16-bit number would lose a small update."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(dtype, copy=True)


def forward_of(loaded: LoadedModel, advanced: Advanced, *, rules: int = RULES) -> Forward:
    """How the forward passes of this run are computed. `rules` is the number of the rules that the run
    started with (`schemas.learner.RULES`). Raises Refused when the model does not support
    `advanced.recompute`."""
    if loaded.decoder is None and advanced.recompute:
        raise Refused(
            "advanced.recompute needs a model that runs on our own decoder (docs/models.md), but "
            f"{loaded.base.model.config.model_type!r} runs through Transformers. Remove the key, and "
            "lower advanced.micro_batch_tokens instead"
        )
    return Forward(
        recompute=advanced.recompute,
        fuse=advanced.compile,
        allows_native=not advanced.deterministic,
        allows_wide_native=rules >= 6,
        trains_padding=rules >= 2,
        has_large_chunks=rules >= 4,
        shares_prefixes=rules >= 6,
        fuses_attention=advanced.compile and rules >= 5,
        chunks_general_logits=rules >= 6,
    )


def export(tensors: Tensors) -> bytes:
    """Serialise named tensors as a safetensors file. The same tensors always give the same bytes."""
    ordered = {name: tensors[name].detach().contiguous().cpu() for name in sorted(tensors)}
    return save(ordered, metadata=METADATA)


def parse(data: bytes | memoryview, *, device: torch.device) -> dict[str, torch.Tensor]:
    """Read a safetensors file into tensors on `device`, by name.

    The tensors are aligned, whatever the layout of the file, because kernels choose their code path by
    alignment, and another path gives other bits. A memoryview is memory that we own, so its aligned
    tensors are not copied. Raises CorruptData if the bytes are not a safetensors file.
    """
    try:
        if isinstance(data, memoryview):
            return {name: tensor.to(device) for name, tensor in view_tensors(data).items()}
        tensors = load(data)
    except (SafetensorError, ValueError) as error:
        raise CorruptData(f"these weights are not a safetensors file: {error}") from error
    return {name: tensor.clone().to(device) for name, tensor in tensors.items()}


def check_fit(tensors: Tensors, expected: Tensors, *, what: str = "weights") -> None:
    """Raises CorruptData unless `tensors` has the names and shapes of `expected`, which are those that
    the run trains. The message calls the tensors `what`."""
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    trained = {name: tuple(t.shape) for name, t in expected.items()}
    if found == trained:
        return
    wrong = sorted(n for n in {*found, *trained} if found.get(n) != trained.get(n))
    raise CorruptData(
        f"the {what} do not fit the model: {wrong[0]} has shape {found.get(wrong[0])}, the run "
        f"trains {trained.get(wrong[0])} ({len(wrong)} tensors differ). If the model that "
        "experiment.model_path names was changed since the run began, put it back or submit again"
    )


def checkpoint_files(policy: Policy, job: LearnerJob) -> tuple[dict[str, bytes], str]:
    """The files of a checkpoint directory except for its weights, and the file name of the weights.

    With them plain Transformers and PEFT can load the directory. With LoRA, a base model that has no
    public name is included completely, under base/.
    """
    base = policy.loaded.base
    tokenizer = _saved_files(base.tokenizer.save_pretrained)
    if job.config.advanced.tuning == "full":
        configs = _saved_files(base.model.config.save_pretrained)
        return {**tokenizer, **configs, **_generation_config(base)}, MODEL_NAME
    advanced = job.config.advanced
    modules = target_modules(base, advanced.lora_targets)
    config = adapter_config(
        base,
        modules,
        rank=advanced.lora_rank,
        scaling=policy.scaling,
        is_dora=advanced.lora_variant == "dora",
        head=SCORE if advanced.algorithm == "reward_model" else None,
    )
    files = {**tokenizer, ADAPTER_CONFIG: config}
    if base.public_name is None:
        whole = {
            **tokenizer,
            **_saved_files(base.model.config.save_pretrained),
            **_generation_config(base),
            MODEL_NAME: export(base.parameters),
        }
        files |= {f"base/{name}": content for name, content in whole.items()}
    return files, ADAPTER_NAME


def _generation_config(base: Base) -> Mapping[str, bytes]:
    generation = base.model.generation_config
    return {} if generation is None else _saved_files(generation.save_pretrained)


def _saved_files(save_pretrained: Callable[[str], object]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="headrace-files-") as folder:
        save_pretrained(folder)
        paths = sorted(p for p in Path(folder).rglob("*") if p.is_file())
        return {str(p.relative_to(folder)): p.read_bytes() for p in paths}
