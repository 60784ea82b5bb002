"""The forward pass of every other architecture: Transformers' own module, with our tensors in it.

Full weights replace the module's parameters during a call. Adapters go through peft: its layers are
injected into the module once per (modules, rank, scaling, kind), and their parameters are replaced in
the same way. The shared base is never written to. This is slower than `trainer/forward/decoder.py`, and
correct for any model.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.func import functional_call
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from schemas.models.families import has_rope_of_length
from trainer.forward.lm_head import WIDE, logits_of
from trainer.forward.packing import MicroBatch
from trainer.model.base import Base
from trainer.model.lora_names import Scaling, Tensors, adapter_magnitudes, adapter_pairs

PROBE_TOKENS = 8


@dataclass(frozen=True, eq=False)
class Fallback:
    """A base model behind Transformers' forward pass."""

    base: Base
    injected: dict[tuple[tuple[str, ...], int, Scaling, bool], str] = field(default_factory=dict)

    def outputs(
        self, trained: Tensors, micro: MicroBatch, *, scaling: Scaling, trains_padding: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The input (M, H) and the output (M, vocabulary) of the output head, for plain rows: one
        sequence each, padded on the right."""
        (block,) = micro.blocks
        self._train_padding(on=trains_padding)
        output, read = self._call(
            trained,
            scaling,
            input_ids=micro.tokens_N[block.query_B_T],
            attention_mask=block.valid_B_T.long(),
        )
        at_M = micro.place_N[micro.predictor_M]
        return read.flatten(0, 1)[at_M], _logits_of(output).flatten(0, 1)[at_M]

    def hidden_states(
        self, trained: Tensors, micro: MicroBatch, *, scaling: Scaling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The input (M, H) of the output head, and the weight (V, H) of the head. No logits are
        computed, which for all tokens of the rows would be the largest tensor of a step."""
        (block,) = micro.blocks
        self._train_padding(on=True)
        read: list[tuple[torch.Tensor, torch.Tensor]] = []

        def stop(head: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            assert isinstance(head.weight, torch.Tensor)  # noqa: S101 - only a Linear gets here
            read.append((arguments[0], head.weight))
            return (arguments[0][..., :0, :],)

        hook = self.base.model.get_output_embeddings().register_forward_pre_hook(stop)
        try:
            inputs: dict[str, object] = {
                "input_ids": micro.tokens_N[block.query_B_T],
                "attention_mask": block.valid_B_T.long(),
            }
            self._answer(trained, scaling, inputs)
        finally:
            hook.remove()
        hidden, head_V_H = read[-1]
        return hidden.flatten(0, -2)[micro.place_N[micro.predictor_M]], head_V_H

    @cached_property
    def has_plain_head(self) -> bool:
        """Whether the model's logits are the product of the input of its output head with the weight of
        the head. Some architectures scale or bound them after it."""
        head = self.base.model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear) or head.bias is not None:
            return False
        return self._returns_head_output(head)

    @torch.no_grad()
    def _returns_head_output(self, head: torch.nn.Linear) -> bool:
        """Whether the numbers that come out of the model are those that its head has put in, for numbers
        that a bound would change."""
        model = self.base.model
        shape = (1, PROBE_TOKENS, len(head.weight))
        put = torch.linspace(-100, 100, shape[1] * shape[2], device=model.device)
        put = put.view(shape).to(model.dtype)
        hook = head.register_forward_hook(lambda *_: put)
        try:
            tokens = torch.arange(PROBE_TOKENS, device=put.device)[None] % len(head.weight)
            self._activate(None)
            logits = _logits_of(model(input_ids=tokens))
        finally:
            hook.remove()
        return torch.equal(logits.float(), put.float())

    def _train_padding(self, *, on: bool) -> None:
        """Transformers' embeddings drop the gradient of the padding token, which often is also the token
        that ends a turn. Padding reaches no action, so there is no reason to drop it."""
        embedding = self.base.model.get_input_embeddings()
        pads = self.base.model.config.get_text_config().pad_token_id
        if isinstance(embedding, torch.nn.Embedding):
            embedding.padding_idx = None if on else pads

    def extend(
        self, trained: Tensors, ids_T: torch.Tensor, cache: Cache | None, *, scaling: Scaling
    ) -> tuple[torch.Tensor, Cache]:
        """Read more tokens: the logits (vocabulary) after the last of `ids_T`, and the extended
        cache."""
        logits_R_V, grown = self._extend(trained, scaling, ids_T[None], cache)
        return logits_R_V[0], grown

    def extend_rows(
        self,
        trained: Tensors,
        ids_R_T: torch.Tensor,
        cache: Cache | None,
        *,
        scaling: Scaling,
        valid_R_U: torch.Tensor,
    ) -> tuple[torch.Tensor, Cache]:
        """The same for several rows: the logits (R, vocabulary). `valid_R_U` is False for the padding on
        the left of all tokens so far, these included."""
        positions_R_U = (valid_R_U.cumsum(-1) - 1).clamp_(min=0)
        return self._extend(
            trained,
            scaling,
            ids_R_T,
            cache,
            attention_mask=valid_R_U.long(),
            position_ids=positions_R_U[:, -ids_R_T.shape[1] :],
        )

    def _extend(
        self,
        trained: Tensors,
        scaling: Scaling,
        ids_R_T: torch.Tensor,
        cache: Cache | None,
        **inputs: object,
    ) -> tuple[torch.Tensor, Cache]:
        output, _ = self._call(
            trained, scaling, input_ids=ids_R_T, past_key_values=cache, use_cache=True, **inputs
        )
        grown = output.past_key_values
        assert grown is not None  # noqa: S101 - it was asked for, and check_causal saw one
        return _logits_of(output)[:, -1], grown

    @cached_property
    def has_independent_rows(self) -> bool:
        """Whether rows can be sampled together: with padding before it, among others, and after another
        has left, a row has the logits that it has alone, up to rounding. A model that keeps a state
        instead of keys may read the padding into it, and some take no positions. A rotary embedding
        that changes with the length changes with the longest row."""
        if has_rope_of_length(self.base.model.config.get_text_config().to_dict()):
            return False
        try:
            with torch.no_grad():
                alone, together = self._probe_rows()
        except (AttributeError, TypeError, ValueError):
            return False
        allowed = 1e-3 if self.base.model.dtype in WIDE else 5e-2
        return bool((together - alone).abs().max() <= allowed * (1 + alone.abs().max()))

    def _probe_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits (2, V) after three and four tokens of a row alone, and beside a longer row."""
        device, scaling = self.base.model.device, Scaling(1.0)
        size = self.base.model.config.get_text_config().vocab_size
        short, long = (torch.arange(a, b, device=device) % size for a, b in ((1, 4), (2, 8)))
        first, cache = self.extend({}, short, None, scaling=scaling)
        second, _ = self.extend({}, short[:1], cache, scaling=scaling)
        ids_R_T = torch.stack([long, F.pad(short, (3, 0))])
        valid_R_U = torch.ones_like(ids_R_T).bool()
        valid_R_U[1, :3] = False
        both, shared = self.extend_rows({}, ids_R_T, None, scaling=scaling, valid_R_U=valid_R_U)
        if not isinstance(shared, DynamicCache):
            raise TypeError(f"rows cannot leave a {type(shared).__name__}")
        shared.batch_select_indices(torch.tensor([1], device=device))
        valid_R_U = F.pad(valid_R_U[1:], (0, 1), value=True)
        later, _ = self.extend_rows(
            {}, short[None, :1], shared, scaling=scaling, valid_R_U=valid_R_U
        )
        return torch.stack([first, second]), torch.stack([both[1], later[0]])

    def _call(
        self, trained: Tensors, scaling: Scaling, **inputs: object
    ) -> tuple[CausalLMOutputWithPast, torch.Tensor]:
        """The model's output, and the input of its output head. The head computes in at least fp32, and
        what the architecture does to logits after it (a soft cap) is done to these."""
        read: list[torch.Tensor] = []

        def widen(
            head: torch.nn.Module, arguments: tuple[torch.Tensor], logits: torch.Tensor
        ) -> torch.Tensor:
            read.append(arguments[0])
            return logits if logits.dtype in WIDE else _wide(head, arguments[0])

        hook = self.base.model.get_output_embeddings().register_forward_hook(widen)
        try:
            return self._answer(trained, scaling, inputs), read[-1]
        finally:
            hook.remove()

    def _answer(
        self, trained: Tensors, scaling: Scaling, inputs: dict[str, object]
    ) -> CausalLMOutputWithPast:
        pairs = adapter_pairs(trained)
        model = self.base.model
        if not pairs:
            self._activate(None)
            low = {n: t.to(model.dtype) for n, t in self._plain(trained).items()}
            return functional_call(model, low, kwargs=inputs)
        rank = next(iter(pairs.values()))[0].shape[0]
        magnitudes = adapter_magnitudes(trained)
        name = self._inject(tuple(sorted(pairs)), rank, scaling, is_dora=bool(magnitudes))
        self._activate(name)
        replaced = {
            f"{module}.lora_{part}.{name}.weight": tensor
            for module, pair in pairs.items()
            for part, tensor in zip("AB", pair, strict=True)
        } | {
            f"{module}.lora_magnitude_vector.{name}.weight": tensor
            for module, tensor in magnitudes.items()
        }
        return functional_call(model, replaced, kwargs=inputs)

    def _plain(self, trained: Tensors) -> dict[str, torch.Tensor]:
        """Full weights by name. A layer that peft has wrapped keeps its own weights under base_layer."""
        wrapped = {module for modules, *_ in self.injected for module in modules}

        def rename(name: str) -> str:
            module, _, leaf = name.rpartition(".")
            return f"{module}.base_layer.{leaf}" if module in wrapped else name

        return {rename(name): tensor for name, tensor in trained.items()}

    def _inject(
        self, modules: tuple[str, ...], rank: int, scaling: Scaling, *, is_dora: bool
    ) -> str:
        key = (modules, rank, scaling, is_dora)
        if key not in self.injected:
            name = f"shape{len(self.injected)}"
            config = LoraConfig(
                r=rank,
                lora_alpha=scaling.alpha,  # type: ignore[arg-type]  # peft says int and divides
                use_rslora=scaling.is_rank_stabilized,
                use_dora=is_dora,
                lora_dropout=0.0,
                target_modules=list(modules),
            )
            inject_adapter_in_model(config, self.base.model, adapter_name=name)
            self.base.model.eval().requires_grad_(requires_grad=False)
            self.injected[key] = name
        return self.injected[key]

    def _activate(self, name: str | None) -> None:
        for module in self.base.model.modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(enabled=name is not None)
                if name is not None:
                    module.set_adapter(name)
        self.base.model.requires_grad_(requires_grad=False)


def _logits_of(output: CausalLMOutputWithPast) -> torch.Tensor:
    assert output.logits is not None  # noqa: S101 - no model leaves them out
    return output.logits


def _wide(head: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The head's logits (..., vocabulary) with fp32 sums."""
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, torch.Tensor)  # noqa: S101 - an output head is a linear layer
    logits = logits_of(hidden.flatten(0, -2), weight).unflatten(0, hidden.shape[:-1])
    return logits if bias is None else logits + bias
