"""The language model in a GGUF file, as far as its header tells, and whether it can be used exactly.

A file is accepted only if everything in it that changes the model's results is understood: its
architecture, every entry of that architecture, every tensor, and how its tokenizer splits text. Without
these checks a reader fills in defaults, and trains another model than the one that was published.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from schemas.errors import Refused
from schemas.models.gguf import GgufHeader, GgufTensor, Value, read_header

ARCHITECTURES = {
    "llama": "Llama, Mistral, SmolLM and SmolLM2",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3",
}
"""Architecture -> the families that have it."""

SPLITS = ("gpt-2", "llama-bpe", "qwen2", "smollm")
"""The known ways in which a tokenizer splits a text before it merges."""

TOKENS, KINDS, MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges"))
TEMPLATE = "tokenizer.chat_template"
KEPT = frozenset({TOKENS, KINDS, MERGES})
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens: special ones, and others that are matched as a whole."""

INSTEAD = "use the model's safetensors instead"
REQUIRED = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    "rope.freq_base",
)
HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
OTHERS = (*HEAD_SIZES, "vocab_size", "rope.scaling.type")


@dataclass(frozen=True, slots=True)
class GgufShape:
    """The numbers that describe a decoder. `tied`: the output uses the embeddings."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    epsilon: float
    rope_theta: float
    tied: bool


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A byte-level BPE tokenizer: its tokens in the order of their ids, the kind of each, its merges,
    and how it splits a text first. `special` maps a role (`bos`, `eos`, `unknown`, `padding`) to an
    id."""

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    split: str
    special: Mapping[str, int]
    chat_template: str


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model that can be used exactly. `tensors` maps the names of Transformers to the tensors."""

    architecture: str
    shape: GgufShape
    tokenizer: GgufTokenizer
    tensors: Mapping[str, GgufTensor]

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_values for tensor in self.tensors.values())


def read_model(file: BinaryIO, *, size: int, what: str) -> GgufModel:
    """Read what the header of a file of `size` bytes says about its model. Raises Refused, which calls
    the file `what`, unless the model can be used exactly."""
    header = read_header(file, size=size, what=what, keep=KEPT)
    metadata = _Metadata(header.metadata, what)
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        families = ", ".join(f"{name} ({of})" for name, of in ARCHITECTURES.items())
        raise Refused(
            f"{what} has the architecture {architecture[:40]!r}; a GGUF file may have one of "
            f"{families}. For another architecture, {INSTEAD}"
        )
    if metadata.values.get("split.count", 1) != 1:
        raise Refused(
            f"{what} is one part of a model; merge its parts into one file with llama-gguf-split "
            "--merge, and name that file"
        )
    shape = _read_shape(architecture, metadata, header)
    tensors = _find_tensors(architecture, shape, header, what)
    return GgufModel(architecture, shape, _read_tokenizer(metadata, shape), tensors)


def _read_shape(architecture: str, metadata: "_Metadata", header: GgufHeader) -> GgufShape:
    prefix, what = f"{architecture}.", metadata.what
    for key in metadata.values:
        if key.startswith(prefix) and key.removeprefix(prefix) not in (*REQUIRED, *OTHERS):
            raise Refused(
                f"{what} has the entry {key[:80]!r}, which is not read from GGUF files; {INSTEAD}"
            )
    if (scaling := metadata.values.get(f"{prefix}rope.scaling.type", "none")) != "none":
        raise Refused(
            f"{what} scales its positions ({scaling!r}), which is not read from GGUF files; {INSTEAD}"
        )
    tokens = metadata.texts(TOKENS)
    hidden, heads = (
        metadata.number(prefix + key) for key in ("embedding_length", "attention.head_count")
    )
    layers = metadata.number(f"{prefix}block_count")
    sizes = {metadata.number(prefix + key, default=0) for key in HEAD_SIZES} - {0}
    head_dim = min(sizes, default=hidden // heads)
    if len(sizes) > 1 or head_dim % 2 or not head_dim:
        raise Refused(
            f"{what} has heads of the sizes {sorted(sizes)}; all of them must have one even size"
        )
    vocabulary = metadata.number(f"{prefix}vocab_size", default=len(tokens))
    embeddings = header.tensors.get("token_embd.weight")
    rows = embeddings.shape[0] if embeddings else 0
    if not len(tokens) == vocabulary == rows:
        raise Refused(
            f"{what} has a tokenizer of {len(tokens)} tokens, a vocabulary of {vocabulary} and {rows} "
            "embeddings, which must be equal; convert the model again"
        )
    if layers > len(header.tensors):
        raise Refused(
            f"{what} claims {layers} layers and has {len(header.tensors)} tensors; convert "
            "the model again"
        )
    return GgufShape(
        vocabulary=vocabulary,
        hidden=hidden,
        intermediate=metadata.number(f"{prefix}feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=metadata.number(f"{prefix}attention.head_count_kv"),
        head_dim=head_dim,
        context=metadata.number(f"{prefix}context_length"),
        epsilon=metadata.real(f"{prefix}attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.real(f"{prefix}rope.freq_base"),
        tied="output.weight" not in header.tensors,
    )


def _find_tensors(
    architecture: str, shape: GgufShape, header: GgufHeader, what: str
) -> dict[str, GgufTensor]:
    """The tensors by the names of Transformers. Raises Refused unless they are exactly those of the
    architecture, with its shapes."""
    found: dict[str, GgufTensor] = {}
    names: set[str] = set()
    for name, own_name, expected in _expected_tensors(architecture, shape):
        tensor = header.tensors.get(name)
        if tensor is None or tensor.shape != expected:
            how = f"the shape {tensor.shape}" if tensor else "no tensor"
            raise Refused(
                f"{what} has {how} in the place of {name}, which must have the shape {expected}; "
                "convert the model again"
            )
        found[own_name] = tensor
        names.add(name)
    if more := sorted(header.tensors.keys() - names):
        raise Refused(
            f"{what} has the tensor {more[0][:80]!r}, which {architecture} models do not have or which "
            f"is not read from GGUF files; {INSTEAD}"
        )
    return found


def _expected_tensors(
    architecture: str, shape: GgufShape
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Each tensor of a model: its name in the file, its name in Transformers, its shape."""
    hidden, inner, head = shape.hidden, shape.intermediate, shape.head_dim
    queries, keys = shape.heads * head, shape.kv_heads * head
    yield "token_embd.weight", "model.embed_tokens.weight", (shape.vocabulary, hidden)
    yield "output_norm.weight", "model.norm.weight", (hidden,)
    if not shape.tied:
        yield "output.weight", "lm_head.weight", (shape.vocabulary, hidden)
    weights: list[tuple[str, str, tuple[int, ...]]] = [
        ("attn_norm.weight", "input_layernorm.weight", (hidden,)),
        ("attn_q.weight", "self_attn.q_proj.weight", (queries, hidden)),
        ("attn_k.weight", "self_attn.k_proj.weight", (keys, hidden)),
        ("attn_v.weight", "self_attn.v_proj.weight", (keys, hidden)),
        ("attn_output.weight", "self_attn.o_proj.weight", (hidden, queries)),
        ("ffn_norm.weight", "post_attention_layernorm.weight", (hidden,)),
        ("ffn_gate.weight", "mlp.gate_proj.weight", (inner, hidden)),
        ("ffn_up.weight", "mlp.up_proj.weight", (inner, hidden)),
        ("ffn_down.weight", "mlp.down_proj.weight", (hidden, inner)),
    ]
    if architecture == "qwen2":
        weights += [
            ("attn_q.bias", "self_attn.q_proj.bias", (queries,)),
            ("attn_k.bias", "self_attn.k_proj.bias", (keys,)),
            ("attn_v.bias", "self_attn.v_proj.bias", (keys,)),
        ]
    if architecture == "qwen3":
        weights += [
            ("attn_q_norm.weight", "self_attn.q_norm.weight", (head,)),
            ("attn_k_norm.weight", "self_attn.k_norm.weight", (head,)),
        ]
    for layer in range(shape.layers):
        for name, own_name, expected in weights:
            yield f"blk.{layer}.{name}", f"model.layers.{layer}.{own_name}", expected


def _read_tokenizer(metadata: "_Metadata", shape: GgufShape) -> GgufTokenizer:
    what, tokens = metadata.what, metadata.texts(TOKENS)
    kind = metadata.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise Refused(
            f"{what} has a tokenizer of the kind {kind[:40]!r}, and only 'gpt2' (byte-level BPE) is "
            f"read from GGUF files; {INSTEAD}"
        )
    split = metadata.text("tokenizer.ggml.pre")
    if split not in SPLITS:
        raise Refused(
            f"{what} has a tokenizer that splits text as {split[:40]!r}; a GGUF file may have one of "
            f"{', '.join(SPLITS)}. Otherwise {INSTEAD}"
        )
    if len(set(tokens)) < len(tokens):
        raise Refused(f"{what} has a tokenizer with equal tokens; convert the model again")
    kinds = metadata.values.get(KINDS, (1,) * len(tokens))
    if not isinstance(kinds, tuple) or len(kinds) != len(tokens):
        raise Refused(f"{what} has not one kind for each token; convert the model again")
    known, merges = set(tokens), []
    for merge in metadata.texts(MERGES):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= known:
            raise Refused(
                f"{what} has a tokenizer that merges {merge[:40]!r}, which are not its tokens; convert "
                "the model again"
            )
        merges.append((left, right))
    template = metadata.values.get(TEMPLATE)
    if not isinstance(template, str) or not template.strip():
        raise Refused(
            f"{what} has no chat template, which Headrace needs: name the file of its instruction-tuned "
            "version"
        )
    special = {}
    for role in ("bos", "eos", "unknown", "padding"):
        key = f"tokenizer.ggml.{role}_token_id"
        if key in metadata.values:
            special[role] = metadata.number(key, least=0)
            if special[role] >= shape.vocabulary:
                raise Refused(
                    f"{what} has {key} = {special[role]}, which must be below its {shape.vocabulary} "
                    "tokens; convert the model again"
                )
    if "eos" not in special:
        raise Refused(
            f"{what} does not say which token ends an answer (tokenizer.ggml.eos_token_id); convert the "
            "model again"
        )
    return GgufTokenizer(
        tokens, tuple(map(int, kinds)), tuple(merges), split, special, chat_template=template
    )


class _Metadata:
    """The metadata of a file, with the checks of its types."""

    def __init__(self, values: Mapping[str, Value], what: str) -> None:
        self.values = values
        self.what = what

    def text(self, key: str) -> str:
        """A text; the empty one if there is none."""
        value = self.values.get(key, "")
        return value if isinstance(value, str) else repr(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """An array of texts. Raises Refused when there is none."""
        value = self.values.get(key)
        if isinstance(value, tuple):
            found = tuple(text for text in value if isinstance(text, str))
            if len(found) == len(value):
                return found
        raise Refused(f"{self.what} has no {key}; convert the model again")

    def number(self, key: str, *, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least` to 2^31. Raises Refused when there is none, and no default."""
        value = self.values.get(key, default)
        if value == default and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 31:
            raise Refused(
                f"{self.what} has {key} = {str(value)[:40]}; it must be a whole number from {least} on"
            )
        return value

    def real(self, key: str) -> float:
        """A finite number above 0. Raises Refused when there is none."""
        value = self.values.get(key)
        if not isinstance(value, float | int) or not math.isfinite(value) or value <= 0:
            raise Refused(f"{self.what} has {key} = {str(value)[:40]}; it must be a number above 0")
        return float(value)
