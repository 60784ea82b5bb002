"""Broken and hostile GGUF files are refused with words, before anything is allocated."""

import io
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import Refused
from schemas.models import gguf
from schemas.models.gguf_model import GgufModel, read_model
from tests.architecture.test_error_samples import REMEDY
from tests.kit.gguf_files import TOKENS, entry, header, tensor, text, write_gguf

HUGE = (1 << 63) - 1
ROOM = bytes(4096)


def read(data: bytes) -> GgufModel:
    return read_model(io.BytesIO(data), size=len(data), what="m.gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, kind="Q8_0")
    return path.read_bytes()


BYTES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut short"),
    "magic": (header(magic=b"PK\3\4"), "does not begin with GGUF"),
    "version": (header(version=1), "the version 1 of GGUF"),
    "other byte order": (header(version=3 << 24), "version 50331648"),
    "entries": (header(ROOM, entries=HUGE), f"claims {HUGE} entries"),
    "tensors": (header(ROOM, tensors=HUGE), f"claims {HUGE} tensors"),
    "long key": (header(struct.pack("<Q", HUGE), ROOM, entries=1), "cut short"),
    "not text": (header(struct.pack("<Q", 1), b"\xff", ROOM, entries=1), "cannot be read"),
    "kind of value": (header(entry("k", 77, b""), ROOM, entries=1), "unknown type 77"),
    "kind of array": (
        header(entry("k", 9, struct.pack("<IQ", 9, 1)), ROOM, entries=1),
        "unknown type 9",
    ),
    "long array": (
        header(entry("k", 9, struct.pack("<IQ", 12, HUGE)), ROOM, entries=1),
        "cut short",
    ),
    "long array of texts": (
        header(entry("k", 9, struct.pack("<IQ", 8, HUGE)), ROOM, entries=1),
        f"claims {HUGE} elements",
    ),
    "long array of tokens": (
        header(entry("tokenizer.ggml.token_type", 9, struct.pack("<IQ", 0, HUGE)), entries=1),
        "claims",
    ),
    "twice": (header(entry("k", 0, b"1") * 2, ROOM, entries=2), "the entry 'k' twice"),
    "tensor twice": (header(tensor("t", (4,)) * 2, ROOM, tensors=2), "the tensor 't' twice"),
    "no dimensions": (header(tensor("t", ()), ROOM, tensors=1), "0 dimensions"),
    "many dimensions": (header(tensor("t", (1,) * 99), ROOM, tensors=1), "99 dimensions"),
    "no values": (header(tensor("t", (4, 0)), ROOM, tensors=1), r"shape \(0, 4\)"),
    "part of a block": (header(tensor("t", (40,), kind=8), ROOM, tensors=1), "Q8_0 cannot"),
    "quantization": (header(tensor("t", (4,), kind=99), ROOM, tensors=1), "quantization 99.*F32"),
    "huge tensor": (header(tensor("t", (HUGE, HUGE)), ROOM, tensors=1), "cut short"),
    "far tensor": (header(tensor("t", (4,), offset=1 << 62), ROOM, tensors=1), "cut short"),
    "between": (header(tensor("t", (4,), offset=3), ROOM, tensors=1), "cut short"),
    "shared bytes": (
        header(*(tensor(f"t{n}", (256,)) for n in range(9)), ROOM, tensors=9),
        "claim more bytes",
    ),
    "alignment": (
        header(entry("general.alignment", 4, bytes(4)), ROOM, entries=1),
        "the alignment 0",
    ),
    "no architecture": (header(ROOM), "the architecture ''"),
}


@pytest.mark.parametrize("name", BYTES)
def test_a_header_that_lies_is_refused(name: str) -> None:
    data, says = BYTES[name]
    with pytest.raises(Refused, match=says) as refused:
        read(data)
    assert REMEDY.search(refused.value.message)


ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "part": ({"split.count": 3}, "one part of a model"),
    "unknown entry": ({"llama.attention.sliding_window": 8}, "sliding_window.*not read"),
    "experts": ({"llama.expert_count": 8}, "expert_count"),
    "positions": ({"llama.rope.scaling.type": "yarn"}, "scales its positions"),
    "layers": ({"llama.block_count": 1 << 30}, "claims 1073741824 layers"),
    "more layers": ({"llama.block_count": 3}, "no tensor in the place of blk.2"),
    "fewer layers": ({"llama.block_count": 1}, "has the tensor 'blk.1"),
    "width": ({"llama.embedding_length": 1 << 20}, "token_embd.weight, which must have"),
    "inner width": ({"llama.feed_forward_length": 1 << 20}, "ffn_gate.weight, which must"),
    "heads": ({"llama.attention.head_count": 3}, "heads of the sizes|must have the shape"),
    "no heads": ({"llama.attention.head_count": 0}, "head_count = 0"),
    "odd heads": ({"llama.rope.dimension_count": 7}, r"sizes \[7\]"),
    "rotary part": (
        {"llama.rope.dimension_count": 8, "llama.attention.key_length": 16},
        r"sizes \[8, 16\]",
    ),
    "no context": ({"llama.context_length": None}, "context_length = None"),
    "kind of context": ({"llama.context_length": "long"}, "context_length = long"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon = nan"),
    "base": ({"llama.rope.freq_base": None}, "freq_base = None"),
    "vocabulary": ({"llama.vocab_size": 7}, "tokens, a vocabulary of 7 and"),
    "few tokens": ({"tokenizer.ggml.tokens": ["a", "b"]}, "a tokenizer of 2 tokens"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
    "tokens": ({"tokenizer.ggml.tokens": [1, 2]}, "no tokenizer.ggml.tokens"),
    "equal tokens": ({"tokenizer.ggml.tokens": ["a"] * len(TOKENS)}, "equal tokens"),
    "kinds": ({"tokenizer.ggml.token_type": [1]}, "one kind for each token"),
    "merges": ({"tokenizer.ggml.merges": ["absent absent"]}, "merges 'absent absent'"),
    "half a merge": ({"tokenizer.ggml.merges": ["he"]}, "merges 'he'"),
    "tokenizer": ({"tokenizer.ggml.model": "llama"}, "kind 'llama'.*safetensors"),
    "split": ({"tokenizer.ggml.pre": "brand-new"}, "splits text as 'brand-new'"),
    "no split": ({"tokenizer.ggml.pre": None}, "splits text as ''"),
    "end": ({"tokenizer.ggml.eos_token_id": 1 << 20}, "eos_token_id = 1048576"),
    "no end": ({"tokenizer.ggml.eos_token_id": None}, "which token ends an answer"),
    "no template": ({"tokenizer.chat_template": None}, "no chat template"),
    "empty template": ({"tokenizer.chat_template": " "}, "no chat template"),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_model_that_cannot_be_used_exactly_is_refused(tmp_path: Path, name: str) -> None:
    metadata, says = ENTRIES[name]
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata=metadata)
    data = path.read_bytes()
    with pytest.raises(Refused, match=says) as refused:
        read(data)
    assert REMEDY.search(refused.value.message)


def test_an_architecture_that_is_not_read_is_refused(whole: bytes) -> None:
    with pytest.raises(Refused, match=r"architecture 'mamba'.*qwen2.*safetensors"):
        read(whole.replace(text("llama"), text("mamba")))


def test_a_tensor_that_the_architecture_does_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "qwen2")
    data = path.read_bytes().replace(b"qwen2", b"qwen3")
    with pytest.raises(Refused, match=r"no tensor in the place of blk.0.attn_q_norm"):
        read(data)


def test_a_whole_file_tells_its_shape(whole: bytes) -> None:
    model = read(whole)
    assert (model.shape.layers, model.shape.head_dim, model.shape.tied) == (2, 16, True)
    assert model.tokenizer.tokens == TOKENS


def test_a_file_cut_at_any_byte_is_refused(whole: bytes) -> None:
    size = len(whole)
    places = [*range(400), *range(400, size, size // 300), size - 1]
    for place in places:
        with pytest.raises(Refused):
            read(whole[:place])


def test_a_file_with_changed_bytes_raises_nothing_else(whole: bytes) -> None:
    drawn = random.Random(1)
    end = whole.index(b"output_norm.weight") + 200
    tracemalloc.start()
    refused = 0
    for _ in range(120):
        data = bytearray(whole)
        for _ in range(drawn.choice((1, 2, 8))):
            data[drawn.randrange(end)] = drawn.randrange(256)
        try:
            read(bytes(data))
        except Refused:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 30
    assert peak < 16 << 20


def test_a_long_header_is_not_read(monkeypatch: pytest.MonkeyPatch, whole: bytes) -> None:
    monkeypatch.setattr(gguf, "LARGEST_HEADER", 1000)
    with pytest.raises(Refused, match="a header of more than"):
        read(whole)
