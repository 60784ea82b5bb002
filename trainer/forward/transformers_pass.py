"""The forward pass of every other architecture: Transformers' own module, with our tensors in it.

Full weights replace the module's parameters during a call. Adapters go through peft: its layers are
injected into the module once per (modules, rank, scaling, kind), and their parameters are replaced in
the same way. The shared base is never written to. This is slower than `trainer/forward/decoder.py`, and
correct for any model.
"""

from dataclasses import dataclass, field

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.func import functional_call
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from trainer.forward.lm_head import WIDE, logits_of
from trainer.forward.packing import MicroBatch
from trainer.model.base import Base
from trainer.model.lora_names import Scaling, Tensors, adapter_magnitudes, adapter_pairs


@dataclass(frozen=True, slots=True, eq=False)
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
        output, _ = self._call(
            trained, scaling, input_ids=ids_T[None], past_key_values=cache, use_cache=True
        )
        grown = output.past_key_values
        assert grown is not None  # noqa: S101 - it was asked for, and check_causal saw one
        return _logits_of(output)[0, -1], grown

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
