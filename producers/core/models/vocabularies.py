"""The texts of a model's tokens, for a process that loads no model.

Token ids are recorded, and their texts are not. They are read from the tokenizer.json with which the
model samples (of a directory, of this machine's cache of the hub, or of a checkpoint) or from its GGUF
file. A scratch shape states its characters itself. So the texts of old runs can be told too, and what
is recorded does not change. No hub is asked, because a page must not wait for one.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from infra.spine.ports.artifacts import Artifacts
from producers.core.lookup import Lookup
from producers.core.models.gguf_file import read_gguf
from producers.core.models.hub import cached_file
from schemas.artifact_refs import ArtifactRef
from schemas.errors import InvalidConfig, NotFound
from schemas.models.gguf import ENDING
from schemas.models.gguf_model import CONTROL, USER_DEFINED
from schemas.models.scratch import CHARACTERS, SPECIAL_TOKENS, ScratchShape, scratch_shape
from schemas.sampling import ModelRef
from schemas.text import bytes_of_symbol

FILE = "tokenizer.json"
MAX_BYTES = 64 << 20
MAX_ANCESTORS = 64
KEPT = 4

Vocabulary = Mapping[int, bytes]
"""Token id -> the bytes of its text; of a special token those of its name."""


class _Decoder(BaseModel):
    type: str = ""
    decoders: tuple["_Decoder", ...] = ()


class _AddedToken(BaseModel):
    id: int
    content: str


class _Model(BaseModel):
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(BaseModel):
    model: _Model
    added_tokens: tuple[_AddedToken, ...] = ()
    decoder: _Decoder | None = None


class Vocabularies:
    """Finds the vocabularies of models. It keeps the last few."""

    def __init__(self, lookup: Lookup, artifacts: Artifacts) -> None:
        self._lookup = lookup
        self._artifacts = artifacts
        self._kept: dict[tuple[str, int], Vocabulary | None] = {}

    async def of(self, model: ModelRef) -> Vocabulary | None:
        """The vocabulary of a model; None when its tokenizer.json cannot be found here or read."""
        try:
            for _ in range(MAX_ANCESTORS):
                found = model.files.get(FILE) or model.files.get(f"base/{FILE}")
                if found is not None:
                    return await self._of_artifact(found)
                if model.kind != "checkpoint":
                    break
                model = (await self._lookup.run(model.name.rpartition("@")[0])).model
        except NotFound:  # the run or the file was removed
            return None
        match model.kind:
            case "scratch":
                return scratch_vocabulary(scratch_shape(model.name))
            case "directory" | "hub":
                return await self._of_place(model)
            case "checkpoint" | "provider":
                return None

    async def _of_artifact(self, ref: ArtifactRef) -> Vocabulary | None:
        key = (ref.sha256, 0)
        if key not in self._kept:
            if ref.size > MAX_BYTES:
                return None
            data = await self._artifacts.get_artifact(ref, cached=False)
            self._keep(key, await asyncio.to_thread(vocabulary_of, data))
        return self._kept[key]

    async def _of_place(self, model: ModelRef) -> Vocabulary | None:
        try:
            file = await asyncio.to_thread(_file_of, model)
            facts = await asyncio.to_thread(file.stat)
            key = (str(file), facts.st_mtime_ns)
            if key not in self._kept and file.suffix == ENDING:
                self._keep(key, await asyncio.to_thread(gguf_vocabulary, file))
            if key not in self._kept:
                if facts.st_size > MAX_BYTES:
                    return None
                data = await asyncio.to_thread(file.read_bytes)
                self._keep(key, await asyncio.to_thread(vocabulary_of, data))
            return self._kept[key]
        except OSError:
            return None

    def _keep(self, key: tuple[str, int], vocabulary: Vocabulary | None) -> None:
        while len(self._kept) >= KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = vocabulary


def _file_of(model: ModelRef) -> Path:
    if model.name.endswith(ENDING):
        return Path(model.name)
    return cached_file(model.name, FILE) if model.kind == "hub" else Path(model.name) / FILE


def gguf_vocabulary(file: Path) -> Vocabulary | None:
    """The vocabulary of a GGUF file; None when the file cannot be used."""
    try:
        tokenizer = read_gguf(file).tokenizer
    except InvalidConfig:
        return None
    pairs = zip(tokenizer.tokens, tokenizer.kinds, strict=True)
    return {
        number: bytes(bytes_of_symbol(symbol, is_byte_level=kind not in (CONTROL, USER_DEFINED)))
        for number, (symbol, kind) in enumerate(pairs)
    }


def scratch_vocabulary(shape: ScratchShape) -> Vocabulary:
    """The vocabulary of a scratch shape."""
    symbols = [*SPECIAL_TOKENS, *CHARACTERS[shape.vocabulary]]
    return {number: symbol.encode() for number, symbol in enumerate(symbols)}


def vocabulary_of(data: bytes) -> Vocabulary | None:
    """The vocabulary in the content of a tokenizer.json; None when it has none that we know."""
    try:
        file = _TokenizerFile.model_validate_json(data)
    except (ValidationError, RecursionError):
        return None
    vocab = file.model.vocab
    if isinstance(vocab, dict):
        symbols = {number: symbol for symbol, number in vocab.items()}
    else:
        symbols = {number: symbol for number, (symbol, _) in enumerate(vocab)}
    symbols |= {token.id: token.content for token in file.added_tokens}
    decoders = (file.decoder, *file.decoder.decoders) if file.decoder else ()
    is_byte_level = any(one.type == "ByteLevel" for one in decoders)
    return {
        number: bytes(bytes_of_symbol(symbol, is_byte_level=is_byte_level))
        for number, symbol in symbols.items()
    }
