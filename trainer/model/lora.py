"""LoRA (arXiv 2106.09685): which linear layers get an adapter, its first values, its names.

The tensors are our own and have peft's names, so an exported adapter loads in plain Transformers and
PEFT. A is drawn as peft draws it (Kaiming uniform with a = sqrt 5, so within 1/sqrt(in)), and B is zero,
so version 0 equals the base. Each draw is keyed by (seed, module name), so the values do not depend on
the order of the modules. There is no dropout. A DoRA (arXiv 2402.09353) also has a magnitude for each
output, which begins as the length of its row of the weight.
"""

import hashlib
import json
import math
from collections.abc import Sequence

import torch
from peft import LoraConfig
from torch import nn

from schemas.errors import Refused
from trainer.model.base import Base, plain_name
from trainer.model.lora_names import (
    A_SUFFIX,
    B_SUFFIX,
    HEAD_TASK,
    MAGNITUDE_SUFFIX,
    PEFT_PREFIX,
    Scaling,
)

LOCAL_BASE = "./base"
"""The name, in an adapter's config, of a base that is stored with it. `headrace checkpoint download`
replaces it by the absolute path, because peft resolves a relative path from the working directory."""


def target_modules(base: Base, targets: str | tuple[str, ...]) -> tuple[str, ...]:
    """The full names of the modules to adapt. `all-linear` is every linear layer of the language model
    except the output head (a vision tower is left out, because it reads no text). Otherwise `targets`
    are module names or their last parts. Raises Refused when one matches nothing."""
    head = base.model.get_output_embeddings()
    text = set(base.model.get_decoder().modules())
    linear = [
        plain
        for name, module in base.model.named_modules()
        if isinstance(module, nn.Linear)
        and module in text
        and module is not head
        and f"{(plain := plain_name(name))}.weight" in base.tensors  # not a layer of peft's
    ]
    if targets == "all-linear":
        return tuple(sorted(linear))
    wanted = (targets,) if isinstance(targets, str) else targets
    chosen: set[str] = set()
    for target in wanted:
        matches = {name for name in linear if name == target or name.endswith(f".{target}")}
        if not matches:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise Refused(
                f"advanced.lora_targets: no linear layer is called {target!r}. Choose from: {known}"
            )
        chosen |= matches
    return tuple(sorted(chosen))


def fresh_adapter(
    base: Base, modules: tuple[str, ...], *, rank: int, seed: int, is_dora: bool = False
) -> dict[str, torch.Tensor]:
    """Version 0 of an adapter: A is (rank, in), B is (out, rank), both fp32. A DoRA also has the lengths
    of the rows of its weight. Raises Refused when one of them is 0."""
    tensors: dict[str, torch.Tensor] = {}
    for module in modules:
        weight = base.tensors[f"{module}.weight"]
        num_out, num_in = weight.shape
        key = hashlib.sha256(f"lora/{seed}/{module}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
        bound = 1 / math.sqrt(num_in)
        uniform = torch.rand(rank, num_in, generator=generator, dtype=torch.float32)
        name = PEFT_PREFIX + module
        tensors[name + A_SUFFIX] = ((uniform * 2 - 1) * bound).to(weight.device)
        tensors[name + B_SUFFIX] = torch.zeros(num_out, rank, device=weight.device)
        if is_dora:
            tensors[name + MAGNITUDE_SUFFIX] = _row_lengths(weight, module)
    return tensors


def _row_lengths(weight_O_H: torch.Tensor, module: str) -> torch.Tensor:
    length_O = torch.linalg.vector_norm(weight_O_H.float(), dim=1)
    if num_zero := int((length_O == 0).sum()):
        raise Refused(
            f"advanced.lora_variant = 'dora' divides by the length of each row of a weight, but "
            f"{num_zero} of the {len(length_O)} rows of {module} are 0. Name other layers in "
            "advanced.lora_targets, or leave advanced.lora_variant out"
        )
    return length_O


def adapter_config(
    base: Base,
    modules: Sequence[str],
    *,
    rank: int,
    scaling: Scaling,
    is_dora: bool = False,
    head: str | None = None,
) -> bytes:
    """`adapter_config.json`, as peft writes it. A base without a public name is called `./base`, after
    its folder next to the adapter. A plain `base` would be looked up on the hub. `head` is the layer
    that a reward model has instead of the base's output head, and that is stored whole."""
    config = LoraConfig(
        r=rank,
        lora_alpha=scaling.alpha,  # type: ignore[arg-type]  # peft says int and divides
        use_rslora=scaling.is_rank_stabilized,
        use_dora=is_dora,
        lora_dropout=0.0,
        bias="none",
        task_type=HEAD_TASK if head else "CAUSAL_LM",
        modules_to_save=[head] if head else None,
        target_modules=list(modules),
        base_model_name_or_path=base.public_name or LOCAL_BASE,
        inference_mode=True,
    )
    fields = {
        key: sorted(value) if isinstance(value, set | frozenset) else value
        for key, value in config.to_dict().items()
    }
    return json.dumps(fields, indent=2, sort_keys=True, default=str).encode() + b"\n"
