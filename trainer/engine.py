"""The engine of a device worker: a sampler and a learner over one device and one set of base
weights.

engine = Engine(fetch=artifacts.get, threads=2)
engine.sampler, engine.learner     # the ports
await engine.aclose()
"""

from trainer.device_thread import Device
from trainer.learner import TorchLearner
from trainer.sampler.engine import TorchSampler
from trainer.sampler.vllm.engine import VllmSampler
from trainer.sampler.vllm.fleet import Servers
from trainer.weight_cache import Fetch, Read, WeightCache


class Engine:
    """Owns the device thread. `fetch` gives the verified bytes of an artifact (sync or async), `read`
    those of weights into memory of our own. `vllm`: the servers that sample; None: this device does.
    `gpu_share`: how much of a GPU's memory may be taken, where others share it."""

    def __init__(
        self,
        *,
        fetch: Fetch,
        read: Read | None = None,
        threads: int | None = None,
        vllm: Servers | None = None,
        gpu_share: float | None = None,
    ) -> None:
        self._device = Device(threads=threads, gpu_share=gpu_share)
        cache = WeightCache(self._device, fetch, read)
        self.sampler = VllmSampler(cache, vllm) if vllm else TorchSampler(cache)
        self.learner = TorchLearner(cache)

    @property
    def versions(self) -> dict[str, str]:
        """What bits depend on beside seed and data: torch, device, threads."""
        return self._device.versions

    async def aclose(self) -> None:
        """Stop sampling, end the job that runs, and give the thread back."""
        await self.sampler.aclose()
        self._device.close()
