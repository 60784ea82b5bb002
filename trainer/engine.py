"""The engine of a device worker: a sampler, a learner and a scorer over one device and one set of base
weights.

engine = Engine(fetch=artifacts.get, threads=2)
engine.sampler, engine.learner, engine.scorer     # the ports
await engine.aclose()
"""

from collections.abc import Callable
from pathlib import Path

from trainer.device_thread import Device
from trainer.learner import TorchLearner
from trainer.sampler.engine import TorchSampler
from trainer.sampler.vllm.engine import VllmSampler
from trainer.sampler.vllm.fleet import VllmServers
from trainer.scorer import TorchScorer
from trainer.weight_cache import VERSIONS, Fetch, Read, WeightCache


class Engine:
    """A sampler, a learner and a scorer, and the device thread that they use.

    `fetch` returns the verified bytes of an artifact, directly or as an awaitable. `read` reads the
    bytes of weights into memory that we own. `threads` is how many threads torch uses (None: its
    default). `vllm` are the servers that sample (None: sample on this device). `gpu_share` is the share
    of the GPU's memory to use, for a GPU that other processes use too. `models` is the directory for the
    models that are read from GGUF files (None: the user's cache).
    """

    def __init__(
        self,
        *,
        fetch: Fetch,
        read: Read | None = None,
        threads: int | None = None,
        vllm: VllmServers | None = None,
        gpu_share: float | None = None,
        time_share: Callable[[], float] | None = None,
        versions: int = VERSIONS,
        models: Path | None = None,
    ) -> None:
        self._device = Device(threads=threads, gpu_share=gpu_share, time_share=time_share)
        cache = WeightCache(self._device, fetch, read, versions=versions, models=models)
        self.sampler = VllmSampler(cache, vllm) if vllm else TorchSampler(cache)
        self.learner = TorchLearner(cache)
        self.scorer = TorchScorer(cache)

    @property
    def concurrency(self) -> int:
        """How many samples it computes at once. Further ones would wait."""
        return self.sampler.concurrency

    @property
    def versions(self) -> dict[str, str]:
        """The things that the bits of a result depend on besides seed and data: torch, device,
        threads."""
        return self._device.versions

    @property
    def device_kind(self) -> str:
        """The kind of its device, as the cost ledger names it: `cpu`, or `gpu.` and a name."""
        return self._device.kind

    async def aclose(self) -> None:
        """Stop sampling, wait for the job that runs, and end the device thread."""
        await self.sampler.aclose()
        self._device.close()
