"""Replaces all weights of a vLLM server, for full tuning.

A server reports a *label* of its weights, a text that a client sets. Weights that passed the canary have
a label of their own, and another one while they are replaced. So if a server has the same label after
an answer as before it, the answer comes from the weights of that label. No other worker replaced them in
between, and the server was not restarted.

The next version is a file that server and worker see under one path. The worker that replaces weights
holds a lock beside it, and the others wait.
"""

import asyncio
import fcntl
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex

from schemas.errors import CorruptData, Refused, SamplerBusy, StoreAway
from trainer.device_thread import Device
from trainer.policy import MODEL_NAME, export
from trainer.sampler.vllm.canary import Canary, CanaryResult
from trainer.sampler.vllm.client import ServerGone, VllmServer
from trainer.sampler.vllm.server_state import Replica, TargetVersion
from trainer.sampler.vllm.weight_turns import BASE

FRESH_LABEL = "default"
"""The label of a server whose weights nobody replaced."""
PREFIX = "headrace-"


class OtherWeights(SamplerBusy):
    """The server computes with other weights, and another worker may replace them, or did."""


def weights_of(label: str) -> str | None:
    """The weights that a label names; None for unchecked ones, and for a label of others."""
    if label == FRESH_LABEL:
        return BASE
    name, dot, _ = label.rpartition(".")
    return name.removeprefix(PREFIX) if dot and name.startswith(PREFIX) else None


async def replace_weights(server: VllmServer, path: str) -> str:
    """Have the server compute with the weights in the directory `path`, and return the label that it has
    until they are checked. The prefix cache holds keys and values of the old weights, so it is dropped.
    Requests that are in progress get answers from both. Raises OtherWeights when the server was
    restarted or replaced meanwhile."""
    label = _unchecked_label()
    await server.set_weight_label(label)
    await server.reload_weights(path)
    await server.reset_prefix_cache()
    await _expect_label(server, label)
    return label


def _unchecked_label() -> str:
    return f"unchecked.{token_hex(8)}"


async def _expect_label(server: VllmServer, label: str) -> None:
    """Check that a server still has the label under which its weights were replaced. If not, the new
    weights may be there under the label of others, such as that of a server that was restarted before
    they were loaded. So it gets one that vouches for nothing. Raises OtherWeights."""
    if await server.weight_label() != label:
        await server.set_weight_label(_unchecked_label())
        raise _meanwhile_error(server)


def _meanwhile_error(server: VllmServer) -> OtherWeights:
    return OtherWeights(
        f"the weights of the sampler {server.url} were replaced meanwhile. If that goes on, give runs "
        "with advanced.tuning = 'full' servers of their own, and name each server instead of a proxy"
    )


async def confirm_weights(replica: Replica, label: str | None) -> None:
    """Check that a server has had the same weights since they had this label. Raises OtherWeights."""
    if not replica.takes_weights:
        return
    if label is not None and await replica.server.weight_label() == label:
        return
    if replica.label == label:
        replica.weights = replica.label = None
    raise _meanwhile_error(replica.server)


async def _pass(server: VllmServer, unchecked: str, *, weights: str) -> str:
    """Give weights that passed the canary their label, and return it. Raises OtherWeights when they
    were replaced in the meantime."""
    await _expect_label(server, unchecked)
    label = f"{PREFIX}{weights}.{unchecked.rpartition('.')[2]}"
    await server.set_weight_label(label)
    return label


class WholeWeights:
    """Gives servers the weights that a request needs."""

    def __init__(
        self, folder: Path, urls: Sequence[str], *, canary: Canary, device: Device
    ) -> None:
        self._folder = WeightsFolder(folder, urls)
        self._canary = canary
        self._device = device
        self._writing = asyncio.Lock()
        self._written: Path | None = None

    @property
    def is_owner(self) -> bool:
        """Whether this process may replace weights, so that others may not."""
        return self._folder.is_locked

    def give_back(self) -> None:
        """Let other processes replace weights."""
        self._folder.unlock()

    def remove_written(self) -> None:
        """Remove the file of a version, which all servers have read or nobody waits for any more."""
        self._written = None
        if self.is_owner:
            self._folder.clear()

    async def measure_noise(self, replica: Replica, target: TargetVersion) -> float:
        """Return the noise of a server. Where its label says that it has all weights of the target, they
        are the measure, else its base model. Raises what `have_base` raises."""
        label = await replica.server.weight_label() if replica.takes_weights else None
        if target.is_full and label is not None and weights_of(label) == target.weights:
            result = await self._canary.measure_noise(replica, target)
            if not result.problem and await replica.server.weight_label() == label:
                return result.distance
        return await self.have_base(replica, target)

    async def have_base(self, replica: Replica, target: TargetVersion) -> float:
        """Have a server compute with its base model, and return its noise. Raises Refused when that is
        not the base model of the run, and what `have` raises."""
        result = await self.have(replica, target.base)
        if result.problem:
            raise Refused(
                f"the sampler {replica.server.url} cannot be used for this run: {result.problem}. "
                "Start it with the model of experiment.model_path"
            )
        return result.distance

    async def have(self, replica: Replica, target: TargetVersion) -> CanaryResult:
        """Have a server compute with the weights of the target, and check that it does. Weights that it
        has already, from another process or from before our restart, are replaced if they fail. Raises
        OtherWeights when another process may replace them, and ServerGone when the server broke off."""
        if not replica.takes_weights:
            return await self._check(replica, target)
        holds, server = replica.holds, replica.server
        label = await server.weight_label()
        if label is None:
            raise ServerGone(
                f"the sampler {server.url} was restarted and takes no weights any more"
            )
        result = None
        if weights_of(label) == target.weights:
            result = await self._check(replica, target)
            if result.problem and await server.weight_label() != label:
                raise _meanwhile_error(server)
        if result is None or (result.problem and label != FRESH_LABEL):
            replica.weights = replica.label = None
            holds.clear()
            label = await replace_weights(server, await self._path_of(replica, target))
            result = await self._check(replica, target)
            if not result.problem:
                label = await _pass(server, label, weights=target.weights)
        if replica.holds is not holds:
            raise ServerGone(f"the sampler {server.url} broke off while it got new weights")
        if not result.problem:
            replica.weights, replica.label = target.weights, label
            await confirm_weights(replica, label)
        return result

    async def _check(self, replica: Replica, target: TargetVersion) -> CanaryResult:
        if target.sha256 is None:
            return await self._canary.measure_noise(replica, target)
        return await self._canary.check_version(replica, target)

    async def _path_of(self, replica: Replica, target: TargetVersion) -> str:
        """Where the server reads weights from: its own model, or the version, which is written once for
        all servers."""
        if not self._folder.lock():
            raise OtherWeights(
                f"another worker replaces the weights of the sampler {replica.server.url}: give runs "
                "with advanced.tuning = 'full' servers of their own, or wait"
            )
        if not target.is_full:
            if replica.card is None:
                raise ServerGone(f"the sampler {replica.server.url} broke off")
            return replica.card.root
        async with self._writing:
            if self._written is None:
                self._written = await self._device.run(self._write, target)
            return str(self._written)

    def _write(self, target: TargetVersion) -> Path:
        data = export(target.version.trained)
        if hashlib.sha256(data).hexdigest() != target.sha256:
            raise CorruptData(
                f"the weights in memory do not have the recorded hash {target.sha256}. Restart the "
                "worker, so that it fetches them again"
            )
        return self._folder.write(target.weights, data)


class WeightsFolder:
    """A directory for each server, with the lock of the worker that replaces weights there. Workers with
    other servers beside it find the same lock. A version is in the first directory. The locks end with
    their process, and its successor overwrites the version."""

    def __init__(self, folder: Path, urls: Sequence[str]) -> None:
        names = sorted(hashlib.sha256(url.encode()).hexdigest()[:16] for url in urls)
        self._folders = [folder / f"weights-{name}" for name in names]
        self._locks: list[int] = []

    @property
    def is_locked(self) -> bool:
        return bool(self._locks)

    def lock(self) -> bool:
        """Lock all directories. False when another process has one. Raises Refused where nothing can be
        locked, and StoreAway where nothing can be written."""
        if self._locks and all(os.fstat(lock).st_nlink for lock in self._locks):
            return True
        self._release()  # somebody removed the files, so they keep nobody out
        try:
            for folder in self._folders:
                self._locks.append(_open_lock(folder))
                fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            return False
        except StoreAway:
            self._release()
            raise
        except OSError as error:
            self._release()
            raise Refused(
                f"the file {self._folders[0] / 'lock'} cannot be locked ({error}): set "
                "HEADRACE_VLLM_ADAPTERS to a directory whose file system has locks"
            ) from error
        return True

    def unlock(self) -> None:
        """Remove the weights and give the locks back."""
        if self._locks:
            self.clear()
        self._release()

    def _release(self) -> None:
        while self._locks:
            os.close(self._locks.pop())

    def write(self, weights: str, data: bytes) -> Path:
        """Write a version instead of the last one, and return its directory. The locks must be held.
        Raises StoreAway when the disk is full or refuses access."""
        self.clear()
        directory = self._folders[0] / weights
        try:
            directory.mkdir(parents=True)
            (directory / MODEL_NAME).write_bytes(data)
        except OSError as error:
            self.clear()
            raise _unwritable(directory, error) from error
        return directory

    def clear(self) -> None:
        """Remove the weights. A server reads them once."""
        for folder in self._folders:
            for former in folder.iterdir() if folder.is_dir() else ():
                if former.is_dir():
                    shutil.rmtree(former, ignore_errors=True)


def _open_lock(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> StoreAway:
    return StoreAway(
        f"weights for vLLM cannot be written to {folder} ({error}): make room there for all weights of "
        "the model in float32, or set HEADRACE_VLLM_ADAPTERS to another directory"
    )
