"""Manages the vLLM servers, and knows which policy versions each of them holds.

Each of these rules prevents a known failure:
- Every version has a name of its own, made from the hash of its weights. A server's prefix cache is
  keyed by name, so a name that is used twice would silently mix policies.
- A version is loaded into every server that is up before any of them samples from it. If one server
  cannot serve it, none does.
- After each load, the canary compares logprobs (`canary.py`). A server that samples from another policy
  is fenced: this process samples nothing there again, and the run reports a warning.
- Versions that have not been used for a while are unloaded.
- With full tuning a server holds one version at a time. Versions take turns (`weight_turns.py`), and the
  label of the weights must be the same after an answer as when they passed the canary
  (`whole_weights.py`).

A server that does not answer is left out and asked again later. When it is back, versions are loaded
into it again before it samples from them.
"""

import asyncio
import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from schemas.errors import CorruptData, Refused, TransientError
from trainer.device_thread import Device
from trainer.model.base import ADAPTER_CONFIG, ADAPTER_NAME
from trainer.model.lora import adapter_config
from trainer.model.lora_names import adapter_pairs
from trainer.policy import export
from trainer.sampler.vllm import server_state
from trainer.sampler.vllm.canary import Canary, CanaryResult
from trainer.sampler.vllm.client import NO_NEW_WEIGHTS, ServerGone, VllmServer
from trainer.sampler.vllm.server_state import Replica, TargetVersion
from trainer.sampler.vllm.weight_turns import WeightTurns
from trainer.sampler.vllm.whole_weights import OtherWeights, WholeWeights, confirm_weights

logger = logging.getLogger(__name__)

KEPT = 6
"""How many versions stay loaded: the default of the most steps that a run may be off policy, plus 2."""
MOST_RANK = 512
MAX_NUM_SEQS = 256
"""vLLM's own default."""
PATIENCE_S = 240.0
"""How many seconds a request waits for any server. A server takes a minute or two to start."""
IDLE_S = 60.0
"""After so many seconds without a request another worker may replace the weights of the servers."""


@dataclass(frozen=True, slots=True)
class VllmServers:
    """The addresses of the servers. Adapters are written to `folder`, which the servers must see under
    the same path. The last `kept` versions stay loaded (None: KEPT). `max_num_seqs` is how many
    sequences each server computes at once; its API does not say so."""

    urls: tuple[str, ...]
    folder: Path
    api_key: str | None = field(default=None, repr=False)
    patience_s: float = PATIENCE_S
    kept: int | None = None
    max_num_seqs: int = MAX_NUM_SEQS


class Fleet:
    """All servers, and the versions that are loaded into those that are up."""

    def __init__(self, servers: VllmServers, *, device: Device) -> None:
        self.concurrency = servers.max_num_seqs * len(servers.urls)
        self.replicas = [Replica(VllmServer(url, api_key=servers.api_key)) for url in servers.urls]
        self.warnings: list[str] = []
        self._device = device
        self._folder = servers.folder
        self._patience_s = servers.patience_s
        self._kept = servers.kept
        self._turn = asyncio.Lock()
        self._weight_turns = WeightTurns()
        self._canary = Canary(device)
        self._whole = WholeWeights(servers.folder, servers.urls, canary=self._canary, device=device)
        self._recent: dict[str, None] = {}
        self._used: Counter[str] = Counter()
        self._giving_back: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def serving(
        self, target: TargetVersion, *, affinity: str, avoid: Sequence[str] = ()
    ) -> AsyncIterator[Replica]:
        """Yield a server that samples from this version. It is the same server for the same affinity, as
        long as the set of servers stays the same. One to `avoid` serves only if there is no other. The
        version stays loaded inside the block. Raises TransientError when no server answers, Refused when
        a server cannot serve the version, and CorruptData when all servers are fenced."""
        self._used[target.name] += 1
        try:
            async with self._weight_turns.take_turn(target.weights):
                up = await self._ensure_loaded(target)
                if target.name in self._recent:
                    self._recent[target.name] = self._recent.pop(target.name)
                others = [replica for replica in up if replica.server.url not in avoid] or up
                yield max(others, key=lambda one: _rendezvous_weight(one.server.url, affinity))
        finally:
            self._used[target.name] -= 1
            if not self._used[target.name]:
                del self._used[target.name]
            if self._weight_turns.is_idle and self._whole.is_owner:
                self._give_weights_back_later()

    def _give_weights_back_later(self) -> None:
        if self._giving_back is not None:
            self._giving_back.cancel()
        loop = asyncio.get_running_loop()
        self._giving_back = loop.call_later(IDLE_S, self._give_weights_back)

    def _give_weights_back(self) -> None:
        if self._weight_turns.is_idle:
            self._whole.give_back()

    async def _ensure_loaded(self, target: TargetVersion) -> list[Replica]:
        clock = asyncio.get_running_loop().time
        until = clock() + self._patience_s
        others: OtherWeights | None = None
        while True:
            if ready := self._servers_with(target, now=clock()):
                return ready
            async with self._turn:
                up = await self._reachable_servers()
                missing = [replica for replica in up if not replica.has(target)]
                try:
                    if missing:
                        await self._load_into_all(missing, target)
                        await self._unload_oldest(target)
                except OtherWeights as error:
                    others = error
                ready = [replica for replica in up if replica.card and replica.has(target)]
            if ready:
                return ready
            self._raise_if_all_fenced()
            if clock() > until:
                if others is not None:
                    raise others
                raise TransientError(f"no sampler answers: {'; '.join(self._states())}")
            await asyncio.sleep(min(server_state.BACK_S, self._patience_s / 10))

    def _servers_with(self, target: TargetVersion, *, now: float) -> list[Replica]:
        """The servers that are up, if all of them have this version and no server is due to be asked
        again; otherwise an empty list."""
        waiting = [r for r in self.replicas if not r.fenced]
        if any(r.card is None and r.ask_again_at <= now for r in waiting):
            return []
        up = [r for r in waiting if r.card]
        return up if all(r.has(target) for r in up) else []

    async def _reachable_servers(self) -> list[Replica]:
        """Ask the servers again that are away and due. Returns all servers that are up."""
        now = asyncio.get_running_loop().time()
        due = [r for r in self.replicas if not r.card and not r.fenced and r.ask_again_at <= now]
        await asyncio.gather(*(self._connect(replica) for replica in due))
        return [r for r in self.replicas if r.card and not r.fenced]

    async def _connect(self, replica: Replica) -> None:
        try:
            card = await replica.server.card()
            replica.takes_weights = await replica.server.weight_label() is not None
            replica.card = card
            replica.away, replica.silent = None, 0
        except ServerGone as error:
            self.mark_lost(replica, error)

    def mark_lost(self, replica: Replica, error: Exception) -> None:
        """Leave a server out of sampling until it answers again."""
        if replica.away is None:
            logger.warning("sampler %s is away: %s", replica.server.url, error)
        replica.mark_lost(error, now=asyncio.get_running_loop().time())

    async def _load_into_all(self, replicas: Sequence[Replica], target: TargetVersion) -> None:
        """Load a version into these servers. A server that is gone is left out. Any other error unloads
        the version from all servers and is raised."""
        has_adapter = target.sha256 is not None and not target.is_full
        if has_adapter:
            await self._device.run(self._write_adapter, target)
        try:
            ended = await asyncio.gather(
                *(self._load(replica, target) for replica in replicas), return_exceptions=True
            )
        finally:  # also of a request that was cancelled, or the next version would be read from it
            self._whole.remove_written()
        for replica, error in zip(replicas, ended, strict=True):
            if isinstance(error, ServerGone):
                self.mark_lost(replica, error)
        wrong = [e for e in ended if isinstance(e, BaseException) and not isinstance(e, ServerGone)]
        if wrong:
            if has_adapter:
                await self._unload(target.name)
            raise wrong[0]

    async def _load(self, replica: Replica, target: TargetVersion) -> None:
        """Load a version into one server and check it with the canary. Raises ServerGone when the server
        broke off in the meantime, even if only another request noticed it, and Refused when it has
        another base model or cannot serve the version. Fences the server when the canary fails."""
        server, card, noise, holds = replica.server, replica.card, replica.noise, replica.holds
        broke_off = ServerGone(f"the sampler {server.url} broke off while a version was loaded")
        if card is None:
            raise broke_off
        if target.is_full and not replica.takes_weights:
            raise Refused(f"the sampler {server.url} {NO_NEW_WEIGHTS}")
        if target.base_key not in noise:
            noise[target.base_key] = await self._whole.measure_noise(replica, target)
        if target.is_full and replica.weights != target.weights:
            result = await self._whole.have(replica, target)
            if result.problem:
                await self._fence(replica, target, result.problem)
        elif replica.takes_weights and replica.weights != target.weights:
            await self._whole.have_base(replica, target)
        if replica.holds is not holds:
            raise broke_off
        if target.is_full or target.sha256 is None or target.name in holds:
            return
        label = replica.label
        folder = self._folder / target.name
        await server.load(target.name, folder)
        listed = (await server.card()).adapters
        result = await self._canary.check_version(replica, target)
        if listed.get(target.name) != str(folder):
            result = CanaryResult(result.distance, "it does not list the adapter that it was given")
        if replica.holds is not holds:
            raise broke_off
        await confirm_weights(replica, label)
        if result.problem:
            await self._fence(replica, target, result.problem)
        else:
            holds.add(target.name)

    async def _fence(self, replica: Replica, target: TargetVersion, problem: str) -> None:
        replica.fenced = f"{replica.server.url} is fenced: after loading {target.name} {problem}"
        self.warnings.append(replica.fenced)
        logger.error("%s. Nothing is sampled there until this worker restarts", replica.fenced)
        if not target.is_full:
            await asyncio.gather(replica.server.unload(target.name), return_exceptions=True)

    def _write_adapter(self, target: TargetVersion) -> None:
        """Write the adapter as a folder that PEFT and vLLM can read. Raises Refused for a rank that vLLM
        cannot serve, and CorruptData when the tensors do not have the recorded hash."""
        pairs = adapter_pairs(target.version.trained)
        rank = max((a_r_H.shape[0] for a_r_H, _ in pairs.values()), default=0)
        if not 0 < rank <= MOST_RANK:
            raise Refused(
                f"vLLM serves LoRA adapters of rank 1 to {MOST_RANK}, this one has {rank}: lower "
                "advanced.lora_rank, or sample with HEADRACE_SAMPLER=torch"
            )
        data = export(target.version.trained)
        if hashlib.sha256(data).hexdigest() != target.sha256:
            raise CorruptData(
                f"the weights in memory do not have the recorded hash {target.sha256}. Restart the "
                "worker, so that it fetches them again"
            )
        version = target.version
        config = adapter_config(
            version.loaded.base, sorted(pairs), rank=rank, scaling=version.scaling
        )
        folder = self._folder / target.name
        folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(folder / ADAPTER_CONFIG, config)
        _write_atomically(folder / ADAPTER_NAME, data)

    async def _unload_oldest(self, target: TargetVersion) -> None:
        """Record the use of a version, and unload the least recently used ones if there are too many. A
        version in use stays loaded."""
        if target.sha256 is None or target.is_full:
            return
        self._recent.pop(target.name, None)
        self._recent[target.name] = None
        for name in list(self._recent)[: -(self._kept or KEPT)]:
            if not self._used[name]:
                await self._unload(name)

    async def _unload(self, name: str) -> None:
        for replica in self.replicas:
            replica.holds.discard(name)
        up = [replica for replica in self.replicas if replica.card]
        await asyncio.gather(*(r.server.unload(name) for r in up), return_exceptions=True)
        self._recent.pop(name, None)
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def _raise_if_all_fenced(self) -> None:
        """Raise CorruptData when every server is fenced, because waiting would not help."""
        if all(replica.fenced for replica in self.replicas):
            raise CorruptData(
                f"every sampler is fenced: {'; '.join(self._states())}. Restart the vLLM servers, then "
                "the workers"
            )

    def _states(self) -> list[str]:
        return [r.fenced or str(r.away or f"{r.server.url} is new") for r in self.replicas]

    async def aclose(self) -> None:
        """Unload the adapters that were loaded here, and close the connections."""
        for name in list(self._recent):
            await self._unload(name)
        self._whole.give_back()
        await asyncio.gather(*(replica.server.aclose() for replica in self.replicas))


def _rendezvous_weight(url: str, affinity: str) -> bytes:
    """The weight of a server for a key, for rendezvous hashing: when a server leaves, only its own
    requests move to other servers."""
    return hashlib.sha256(f"{affinity}|{url}".encode()).digest()


def _write_atomically(path: Path, data: bytes) -> None:
    """Write the whole file or nothing, because a server may read it at the same time."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_bytes(data)
    scratch.replace(path)
