"""Turns a GGUF file into a model directory, once, in float32.

Everything else reads the directory, which has the form of `save_pretrained`. It is named by the hash of
the file. It is written under another name and then renamed, so a killed process leaves nothing that
could be used, and a lock keeps other processes from writing it too.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file

from schemas.errors import Refused
from schemas.models.gguf import AGAIN, FORMATS, GgufTensor
from schemas.models.gguf_model import GgufModel, read_model
from trainer.model.gguf_tokenizer import gguf_tokenizer

AT_ONCE = 1 << 24
"""The most values that are dequantized together, because that takes several times their memory."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dequantized:
    """The model directory of a GGUF file, and the hash of the file."""

    directory: Path
    sha256: str


def user_models() -> Path:
    """The directory for models in the user's cache, for a process without a home of the platform."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "models"


def dequantize_once(path: Path, models: Path) -> Dequantized:
    """Return the model directory of a GGUF file, below `models`. It is written if it is not there.
    Raises Refused when the file cannot be used exactly or the directory cannot be written."""
    what, began = f"the model {path}", time.monotonic()
    if not path.is_file():  # a pipe would be waited for
        raise Refused(f"{what} cannot be loaded, because there is no such file here; put it there")
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            place = models / sha256
            models.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _hold_lock(models / f"{sha256}.lock"):
                if not place.is_dir():
                    file.seek(0)
                    model = read_model(file, size=os.fstat(file.fileno()).st_size, what=what)
                    _write_whole(file, model, place, what)
                    took = time.monotonic() - began
                    logger.info("dequantized %s once into %s in %.1f s", path, place, took)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refused(
            f"{what} cannot be dequantized into {models}: {reason}; give {models} room and rights, and "
            "check that the file can be read"
        ) from error
    return Dequantized(place, sha256)


@contextlib.contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_whole(file: BufferedReader, model: GgufModel, place: Path, what: str) -> None:
    """Write the directory beside its place, make it durable, and rename it. The caller has the lock."""
    for left in place.parent.glob(f"{place.name}-*.partial"):
        shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{place.name}-", suffix=".partial"))
    try:
        _write(file, model, folder, what)
        file.seek(0)
        if hashlib.file_digest(file, "sha256").hexdigest() != place.name:
            raise Refused(f"{what} changed while it was read; put it in place and submit again")
        for written in (*folder.iterdir(), folder):
            descriptor = os.open(written, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        folder.rename(place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(file: BinaryIO, model: GgufModel, folder: Path, what: str) -> None:
    try:
        tokenizer = gguf_tokenizer(model)
    except Exception as error:  # the library raises plain ones
        raise Refused(
            f"{what} has a tokenizer that cannot be built: {str(error)[:200]}; convert the model again"
        ) from error
    tokenizer.save_pretrained(folder)
    special = model.tokenizer.special
    ends = {
        "bos_token_id": special.get("bos"),
        "eos_token_id": special["eos"],
        "pad_token_id": special.get("padding"),
    }
    (folder / "config.json").write_text(json.dumps({**_config(model), **ends}, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2))
    tensors = {
        name: _read_tensor(file, tensor, model, name) for name, tensor in model.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _config(model: GgufModel) -> dict[str, object]:
    shape = model.shape
    return {
        "model_type": model.architecture,
        "architectures": [f"{model.architecture.capitalize()}ForCausalLM"],
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tied,
        "dtype": "float32",
    }


def _read_tensor(file: BinaryIO, tensor: GgufTensor, model: GgufModel, name: str) -> torch.Tensor:
    """A tensor in float32, in the order of Transformers. It is read a few rows at a time."""
    columns = tensor.shape[-1]
    form = FORMATS[tensor.kind]
    num_rows, row_bytes = tensor.num_values // columns, columns // form.num_values * form.num_bytes
    values_R_C = np.empty((num_rows, columns), dtype=np.float32)
    step = max(1, AT_ONCE // columns)
    file.seek(tensor.offset)
    for first in range(0, num_rows, step):
        rows_R_C = values_R_C[first : first + step]
        data = file.read(len(rows_R_C) * row_bytes)
        if len(data) < len(rows_R_C) * row_bytes:
            raise Refused(f"the file of {tensor.name} became shorter while it was read; {AGAIN}")
        rows_R_C[:] = _dequantize(data, tensor.kind, len(rows_R_C))
    values = torch.from_numpy(values_R_C.reshape(tensor.shape))
    heads = {"q_proj": model.shape.heads, "k_proj": model.shape.kv_heads}
    if model.architecture == "llama" and (count := heads.get(name.split(".")[-2])):
        # llama.cpp rotates neighbours, and Transformers the two halves of a head.
        values = values.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
    return values


def _dequantize(data: bytes, kind: int, num_rows: int) -> NDArray[np.float32]:
    """Rows of values in float32, from `num_rows` rows of blocks."""
    if FORMATS[kind].name == "F32":
        return np.frombuffer(data, dtype="<f4").reshape(num_rows, -1)
    if FORMATS[kind].name == "F16":
        return np.frombuffer(data, dtype="<f2").reshape(num_rows, -1).astype(np.float32)
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(num_rows, -1)
    return dequantize(blocks, GGMLQuantizationType(kind))
