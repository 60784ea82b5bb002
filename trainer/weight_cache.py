"""The weights on a device: base models by reference, and the trained tensors of a few versions.

Sampler and learner share this cache. A base model is loaded once and used by all runs. The learner keeps
each new version here under the hash of its bytes, so that a sampler on the same device uses those
tensors and fetches nothing. The cache may lose anything, because everything can be fetched again by its
reference.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

from schemas.artifact_refs import ArtifactRef
from schemas.sampling import ModelRef, PolicyRef
from trainer.device_thread import Device
from trainer.forward.decoder import decoder_of
from trainer.forward.transformers_pass import Fallback
from trainer.lru_cache import LruCache
from trainer.model.base import build_base
from trainer.model.safetensors_view import alignment_padding
from trainer.policy import LoadedModel, parse

Fetch = Callable[[ArtifactRef], Awaitable[bytes] | bytes]
"""Returns the verified bytes of an artifact."""

Read = Callable[[ArtifactRef, Callable[[bytes], int]], Awaitable[bytes | memoryview]]
"""Like Fetch, but may return a memoryview of a copy that we own. The second argument is a function that
gets the first eight bytes, and returns how many bytes after an aligned address the data should begin."""

VERSIONS = 6
"""How many versions are kept: the default of the most steps that a run may be off policy, plus 2."""

OnKept = Callable[[str, dict[str, torch.Tensor]], None]
"""Called with the hash and the tensors of each version that the learner keeps."""


class WeightCache:
    """Base models and versions, loaded at the first request. Concurrent requests for the same weights
    load them once."""

    def __init__(
        self,
        device: Device,
        fetch: Fetch,
        read: Read | None = None,
        *,
        versions: int = VERSIONS,
        models: Path | None = None,
    ) -> None:
        self.device = device
        self._models = models
        self.versions = versions
        self._fetch = fetch
        self._read = read
        self._loaded: LruCache[LoadedModel] = LruCache(3)
        self._trained: LruCache[dict[str, torch.Tensor]] = LruCache(versions)
        self._locks: dict[str, asyncio.Lock] = {}
        self.on_kept: OnKept | None = None

    async def load_model(self, ref: ModelRef) -> LoadedModel:
        """The base model that `ref` names, on the device. Raises Refused when it cannot be loaded."""
        key = ref.model_dump_json()
        if (found := self._loaded.get(key)) is not None:
            return found
        async with self._locks.setdefault(key, asyncio.Lock()):
            if (found := self._loaded.get(key)) is not None:
                return found
            files = {name: await self._bytes(file) for name, file in ref.files.items()}
            return self._loaded.put(key, await self.device.run(self._load, ref, files))

    async def load_tensors(self, policy: PolicyRef) -> dict[str, torch.Tensor]:
        """The trained tensors of a version by name, on the device. Empty when nothing was trained.
        Raises CorruptData when the artifact is not a safetensors file."""
        if policy.weights is None:
            return {}
        key = policy.weights.sha256
        if (found := self._trained.get(key)) is not None:
            return found
        async with self._locks.setdefault(key, asyncio.Lock()):
            if (found := self._trained.get(key)) is not None:
                return found
            data = (
                await self._read(policy.weights, alignment_padding)
                if self._read
                else await self._bytes(policy.weights)
            )
            tensors = await self.device.run(parse, data, device=self.device.torch)
            return self._trained.put(key, tensors)

    def keep(self, sha256: str, tensors: dict[str, torch.Tensor]) -> None:
        """Keep a version for samplers, under the hash of its bytes. The caller must not change the
        tensors afterwards."""
        self._trained.put(sha256, tensors)
        if self.on_kept is not None:
            self.on_kept(sha256, tensors)

    def _load(self, ref: ModelRef, files: dict[str, bytes]) -> LoadedModel:
        base = build_base(ref, files, device=self.device.torch, models=self._models)
        return LoadedModel(base, decoder_of(base), Fallback(base))

    async def _bytes(self, ref: ArtifactRef) -> bytes:
        data = self._fetch(ref)
        return await data if inspect.isawaitable(data) else data
