"""Builds the base model of a run from what a ModelRef names: a shape and a seed, a directory, a GGUF
file, a hub id, or a checkpoint's files.

The base is frozen and shared. The sampler and all runs with the same ModelRef use these tensors, so
nothing may ever write to them. Weights are fp32 in sampler and learner unless the run sets bfloat16,
which removes nearly all mismatch between the two. Nothing is unpickled: only safetensors and GGUF files
are read, and no remote code is run.
"""

import hashlib
import json
import tempfile
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from schemas.errors import Refused, UserCodeError
from schemas.models.gguf import ENDING
from schemas.models.scratch import scratch_shape
from schemas.sampling import LoraScaling, Message, ModelRef, Precision
from trainer.model.architectures import advice, check_causal, check_known
from trainer.model.char_tokenizer import character_tokenizer
from trainer.model.chat_template import Chat
from trainer.model.dequantize import dequantize_once, user_models
from trainer.model.family_renderer import record_name
from trainer.model.file_checks import check_files
from trainer.model.lora_names import (
    HEAD_TASK,
    Scaling,
    adapter_magnitudes,
    adapter_pairs,
    merged_weight,
    output_factor,
)
from trainer.model.template_process import TemplateOverLimit

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_NAME = "adapter_model.safetensors"

DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

transformers_logging.disable_progress_bar()

PROBE = Message(role="user", content="Hello")
"""The conversation with which a chat template is rendered when its model is loaded."""


def plain_name(name: str) -> str:
    """The name in Transformers of a module or a weight. peft calls a layer that it has wrapped
    base_layer."""
    return name.replace(".base_layer", "")


@dataclass(frozen=True, eq=False)
class Base:
    """A frozen base model. `tensors` are its weights by Transformers' names. `public_name` is its name
    in an adapter's config (None: it has no name outside Headrace). `gguf_sha256` is the hash of the
    GGUF file that it was read from, or None."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    tensors: dict[str, torch.Tensor]
    stop_ids: frozenset[int]
    public_name: str | None
    gguf_sha256: str | None = None

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The weights that full tuning trains, by Transformers' names, each once. The layers that peft
        has put into the model for the adapters of other runs are not among them."""
        named = ((plain_name(name), tensor) for name, tensor in self.model.named_parameters())
        return {name: tensor for name, tensor in named if name in self.tensors}

    @property
    def num_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @cached_property
    def weights_sha256(self) -> str:
        """The hash of all weights: of their names, types and bytes."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            tensor = self.tensors[name].detach().contiguous().cpu()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def num_embeddings(self) -> int:
        """How many tokens the model has an embedding of."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, torch.Tensor)  # noqa: S101 - mypy: an attribute may be a module
        return len(weight)

    @cached_property  # Transformers looks it up again each time, and each sample asks for it
    def context(self) -> int:
        """The number of positions that the model has."""
        text = self.model.config.get_text_config()
        return int(getattr(text, "max_position_embeddings", 1 << 30))


def build_base(
    ref: ModelRef,
    files: Mapping[str, bytes],
    *,
    device: torch.device,
    models: Path | None = None,
) -> Base:
    """Build the model that `ref` names. `files` holds the content of a checkpoint's files. GGUF files
    are dequantized into `models` (None: the user's cache). Raises Refused when there is no such model
    or it cannot be loaded."""
    if ref.kind == "scratch":
        return _wrap_base(*_build_scratch(ref), public_name=None, ref=ref, device=device)
    if ref.kind == "checkpoint":
        return _wrap_base(*_load_checkpoint(ref, files), public_name=None, ref=ref, device=device)
    if ref.kind == "directory" and ref.name.endswith(ENDING):
        made = dequantize_once(Path(ref.name), models or user_models())
        name, what = str(made.directory), f"the model {ref.name}"
        loaded = _load_pretrained(name, what=what)
        return replace(
            _wrap_base(*loaded, public_name=name, ref=ref, device=device), gguf_sha256=made.sha256
        )
    if ref.kind == "directory" and not (Path(ref.name) / "config.json").is_file():
        raise Refused(
            f"{ref.name} is not a model directory: it has no config.json. Give a directory written "
            "by save_pretrained, a .gguf file, a hub id, a checkpoint run@step, or scratch:NAME"
        )
    if ref.kind == "hub":
        _refuse_local_name(ref.name)
    model, tokenizer = _load_pretrained(ref.name, what=f"the model {ref.name}")
    return _wrap_base(model, tokenizer, public_name=ref.name, ref=ref, device=device)


def _refuse_local_name(name: str) -> None:
    """Raise Refused for a hub id that is also the path of a file from here, because Transformers would
    load that instead."""
    if not Path(name).is_absolute() and Path(name).exists():
        raise Refused(
            f"the hub id {name} is also a path in the worker's working directory; start the worker in "
            "another directory, or give the absolute path of the model"
        )


def _wrap_base(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    public_name: str | None,
    ref: ModelRef,
    device: torch.device,
) -> Base:
    dtype = DTYPES[ref.dtype]
    for parameter in model.parameters():
        # Loaded tensors may be anywhere in a mapped file. Kernels choose their path by alignment, and
        # another path gives other bits. Buffers stay as they are, because rotary frequencies rounded
        # to 16 bits would move far positions.
        parameter.data = parameter.data.to(dtype, copy=True)
    _refuse_unfinite(model, what=f"the model {ref.name}")
    _move(model, device)
    model.eval().requires_grad_(requires_grad=False)
    model.config.dtype = dtype
    return Base(
        model=model,
        tokenizer=tokenizer,
        tensors=dict(model.state_dict()),
        stop_ids=_stop_ids(model, tokenizer),
        public_name=public_name,
    )


def _refuse_unfinite(model: PreTrainedModel, *, what: str) -> None:
    """Raise Refused for weights that are infinite or not a number: each logit would become one too, and
    a run would seem to have diverged."""
    for name, weight in model.named_parameters():
        if weight.numel() and not torch.stack(torch.aminmax(weight.data)).isfinite().all():
            raise Refused(
                f"{what} cannot be used: {plain_name(name)} holds values that are not finite numbers; "
                "get its files again, or save it in a wider type"
            )


def _move(model: PreTrainedModel, device: torch.device) -> None:
    try:
        nn.Module.to(model, device)
    except torch.OutOfMemoryError as error:
        needed = sum(p.numel() * p.element_size() for p in model.parameters()) / (1 << 30)
        raise Refused(
            f"the device has no room for the base model's {needed:.1f} GiB: set advanced.precision = "
            "'bfloat16' or name a smaller model. If vLLM shares the GPU, lower "
            "HEADRACE_VLLM_GPU_PERCENT"
        ) from error


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    ids = list(eos) if isinstance(eos, list | tuple) else [eos]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)


_SEEDED = threading.Lock()
"""The random generator of a new model's weights is that of the whole process, and each engine builds on
a thread of its own."""


def _build_scratch(ref: ModelRef) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    shape = scratch_shape(ref.name)
    tokenizer = character_tokenizer(shape)
    config = Qwen3Config(
        vocab_size=shape.vocabulary_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with _SEEDED, torch.random.fork_rng(devices=[]):
        torch.manual_seed(ref.seed)
        model = Qwen3ForCausalLM(config)
    return model.float(), tokenizer


def _load_checkpoint(
    ref: ModelRef, files: Mapping[str, bytes]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with tempfile.TemporaryDirectory(prefix="headrace-model-") as folder:
        for name, content in files.items():
            path = Path(folder) / name
            if not path.resolve().is_relative_to(Path(folder).resolve()):
                raise Refused(f"the checkpoint {ref.name} names a file outside itself: {name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if ADAPTER_CONFIG not in files:
            return _load_pretrained(folder, what=f"the checkpoint {ref.name}")
        return load_merged(Path(folder), what=f"the checkpoint {ref.name}")


def load_merged(
    folder: Path, *, what: str, base: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The adapter in `folder` merged into its base, in fp32, and the tokenizer. The base is `base` if
    that is set, else the folder base/, else the base's public name. Raises Refused when the base cannot
    be loaded or is another model, and when the adapter is that of a reward model."""
    config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    if config.get("task_type") == HEAD_TASK:
        raise Refused(
            f"{what} is a reward model, which scores answers and writes none; name it in "
            "advanced.reward_models, or another model here"
        )
    is_local = (folder / "base").is_dir()
    found = str(folder / "base") if is_local else config["base_model_name_or_path"]
    if base is None and not is_local:
        _refuse_local_name(found)
    model, tokenizer = _load_pretrained(base or found, what=f"the base model of {what}")
    kind: LoraScaling = "rank_stabilized" if config.get("use_rslora") else "standard"
    scale = Scaling(config["lora_alpha"], kind).factor(config["r"])
    weights = dict(model.named_parameters())
    tensors = load_file(folder / ADAPTER_NAME)
    magnitudes = adapter_magnitudes(tensors)
    with torch.no_grad():
        for module, pair in adapter_pairs(tensors).items():
            weight = weights.get(f"{module}.weight")
            fits = (pair[1].shape[0], pair[0].shape[1])
            if weight is None or weight.shape != fits:
                shape = (
                    "does not exist there" if weight is None else f"has shape {tuple(weight.shape)}"
                )
                raise Refused(
                    f"the adapter of {what} does not fit the base model {base or found}: it changes "
                    f"{module} of shape {fits}, which {shape}. Name the adapter's own base model"
                )
            factor_O = None
            if module in magnitudes:
                factor_O = output_factor(magnitudes[module], weight, pair, scale=scale)
            weight.copy_(merged_weight(weight, pair, scale=scale, factor_O=factor_O))
    return model, tokenizer


def _load_pretrained(name: str, *, what: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        check_files(name, what=what)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        check_known(config, what=what)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, found = loaded
        _refuse_missing(found["missing_keys"], what=what)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        check_causal(model.eval(), what=what)
    except (Refused, MemoryError):
        raise
    except Exception as error:  # what the library raises depends on the files
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise Refused(
            f"{what} cannot be loaded: {reason}. Check the name, that its files are complete "
            "(config.json, safetensors, tokenizer), that the hub can be reached, and that its "
            f"architecture is one that Transformers knows. {advice()}"
        ) from error
    if not tokenizer.chat_template:
        raise Refused(
            f"{what} has no chat template, which Headrace needs: name its instruction-tuned version, or "
            "save its tokenizer with a chat_template"
        )
    if not Path(name).is_dir():
        record_name(tokenizer, name)
    _check_template(tokenizer, what=what)
    return model, tokenizer


def _refuse_missing(names: Collection[str], *, what: str) -> None:
    """Raise Refused for weights that the files do not have: the library draws them at random, so each
    process would have another model."""
    if names:
        shown = ", ".join(sorted(names)[:3])
        raise Refused(
            f"{what} cannot be loaded: its safetensors lack {len(names)} weights of its config, such "
            f"as {shown}; complete its files"
        )


def _check_template(tokenizer: PreTrainedTokenizerBase, *, what: str) -> None:
    """Render the chat template once, in its confined process. Raises Refused when it exceeds a limit, so
    that a run fails at its start and not sample by sample. A template may reject the message."""
    try:
        Chat(tokenizer, frozenset()).text([PROBE], reply_next=True)
    except TemplateOverLimit as error:
        raise Refused(f"{what} cannot be used: {error.message}") from error
    except ValueError as error:  # several templates, and none of them is the default
        raise Refused(f"{what} cannot be used: {error}") from error
    except UserCodeError:
        return
