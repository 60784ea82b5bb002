"""B4, publication of an adapter: from the learner's commit until every sampler serves the version.

Real processes on one machine: a learner's side that stores an adapter durably and commits PolicyUpdated
to the log (embedded Postgres, blobs in a directory), and N samplers, each with a torch engine of its own
that holds the base model. A sampler is notified of the commit as workers are, fetches and verifies the
bytes, merges them, and samples with them. It serves the version once the first token is sampled. A
publication is complete when the last sampler reports it. It counts only if all samplers drew the same
token at the same logprob, and another one than with the version before.

TRL's own figure for sending weights to vLLM is 6 to 8 s. Exits with 1 where p50 > 0.5 s or p99 > 1.5 s.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from uuid import UUID, uuid4

import torch

from infra.adapters import Backend, open_backend
from infra.operations.local import embedded_postgres
from infra.settings.settings import Settings
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.migrate import migrate
from schemas.events import PolicyUpdated
from schemas.sampling import (
    DrawKey,
    Message,
    ModelRef,
    PolicyRef,
    SampleRequest,
    SamplingParams,
    Turn,
)
from schemas.specs import StateRef
from trainer.engine import Engine
from trainer.model.base import build_base
from trainer.model.lora import fresh_adapter, target_modules
from trainer.policy import export

MODEL = ModelRef(kind="scratch", name="qwen3-4m", seed=1)
P50_S, P99_S = 0.5, 1.5


def sample_request(policy: PolicyRef) -> SampleRequest:
    """One token, the same draw in every sampler."""
    return SampleRequest(
        model=MODEL,
        policy=policy,
        lora_alpha=32.0,
        params=SamplingParams(temperature=1.0, max_new_tokens=1, seed=1),
        key=DrawKey(purpose="train", step=1, slot=0, replacement=0, sample=0),
        messages=(Message(role="user", content="What is 12 + 15?"),),
    )


async def sampler(run: str) -> None:
    """One sampler: a line of JSON for the base model, and one for each version that it serves."""
    async with open_backend(Settings.load(os.environ)) as backend:
        engine = Engine(
            fetch=backend.artifacts.get_artifact, read=backend.artifacts.read, threads=1
        )
        wakeup, cursor = backend.notifier.subscribe(), Cursor()
        _say(0, await engine.sampler.sample(sample_request(PolicyRef(version=0))))
        while True:
            for recorded in await backend.log.read(
                run, after=cursor, limit=100, types=[PolicyUpdated.type]
            ):
                cursor, event = recorded.cursor, recorded.event
                assert isinstance(event, PolicyUpdated)
                policy = PolicyRef(version=event.step, weights=event.state.weights)
                _say(event.step, await engine.sampler.sample(sample_request(policy)))
            await wakeup.wait(0.25)


def _say(step: int, turn: Turn) -> None:
    """The clock is the machine's, so that processes can be compared."""
    drawn = (turn.completion_ids[0], round(turn.logprobs[0], 5))
    print(json.dumps({"step": step, "at": time.monotonic(), "drawn": drawn}), flush=True)


@dataclass(frozen=True, slots=True)
class Served:
    """When the last sampler served a version (of the machine's clock), and what all of them drew."""

    at: float
    drawn: tuple[int, float]


class Fleet:
    """The samplers' processes."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def served(self, step: int) -> Served:
        """Wait until every sampler serves this version. Raises AssertionError when one has ended, or
        they disagree."""
        said = await asyncio.gather(*(_line(process) for process in self._processes))
        assert {line["step"] for line in said} == {step}, said
        drawn = {(line["drawn"][0], line["drawn"][1]) for line in said}
        assert len(drawn) == 1, f"the samplers serve different weights: {drawn}"
        return Served(max(line["at"] for line in said), drawn.pop())


async def _line(process: asyncio.subprocess.Process) -> dict[str, object] | object:
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line, "a sampler has ended"
    return json.loads(line)


@asynccontextmanager
async def fleet(run: str, environ: dict[str, str], *, workers: int) -> AsyncIterator[Fleet]:
    """The samplers, once each of them has answered with the base model."""
    command = [sys.executable, "-m", "bench.b4_publication", "--sampler", run]
    processes = [
        await asyncio.create_subprocess_exec(*command, env=environ, stdout=asyncio.subprocess.PIPE)
        for _ in range(workers)
    ]
    try:
        started = Fleet(processes)
        await started.served(0)
        yield started
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
        await asyncio.gather(*(process.wait() for process in processes))


def adapters(size_bytes: int, count: int) -> tuple[int, list[bytes]]:
    """The rank whose adapter is nearest to this size, and as many adapters that differ."""
    base = build_base(MODEL, {}, device=torch.device("cpu"))
    modules = target_modules(base, "all-linear")
    per_rank = sum(t.numel() * 4 for t in fresh_adapter(base, modules, rank=1, seed=0).values())
    rank = max(1, round(size_bytes / per_rank))
    made = []
    for seed in range(1, count + 1):
        generator = torch.Generator().manual_seed(seed)
        fresh = fresh_adapter(base, modules, rank=rank, seed=seed)
        spread = {
            name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in fresh.items()
        }
        made.append(export(spread))
    return rank, made


async def publish(backend: Backend, run: str, step: int, weights: bytes) -> tuple[float, float]:
    """Store a version and commit it, like the learner. Returns the seconds that storing took,
    and the machine's clock when the commit had returned."""
    began = time.monotonic()
    ref = await backend.artifacts.put_artifact(weights, run=run, blob=True)
    stored = time.monotonic() - began
    digest = sha256(weights).hexdigest()
    state = StateRef(step=step, weights_sha256=digest, state_sha256=digest, weights=ref)
    event = PolicyUpdated(
        run=run, step=step, state=state, batch=UUID(int=step), metrics={}, plan=(), versions={}
    )
    await backend.log.append([event], cause=uuid4())
    return stored, time.monotonic()


async def measure(
    settings: Settings, environ: dict[str, str], *, size_mb: float, workers: int, count: int
) -> bool:
    """Publish `count` versions, one after the other; print a row. Whether it was fast enough."""
    run = f"b4-{size_mb:g}"
    rank, versions = adapters(round(size_mb * 1e6), count + 1)
    latencies, stored = [], []
    async with open_backend(settings) as backend, fleet(run, environ, workers=workers) as samplers:
        before: tuple[int, float] | None = None
        for step, weights in enumerate(versions, start=1):
            put_s, committed = await publish(backend, run, step, weights)
            found = await samplers.served(step)
            assert found.drawn != before, "the version before is still served"
            before = found.drawn
            latencies.append(found.at - committed)
            stored.append(put_s)
    ordered = sorted(latencies[1:])
    p50 = statistics.median(ordered)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    size = len(versions[0]) / 1e6
    print(
        f"{size:8.1f}{rank:6}{workers:9}{len(ordered):7}{statistics.median(stored[1:]):9.3f}"
        f"{p50:9.3f}{p99:9.3f}{ordered[-1]:9.3f}",
        flush=True,
    )
    return p50 <= P50_S and p99 <= P99_S


async def main(*, sizes: Sequence[float], workers: int, count: int) -> int:
    print(f"B4 publication of an adapter, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print("   MB    rank samplers  times  store s    p50 s    p99 s    max s")
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory) / "home"
        server = await asyncio.to_thread(embedded_postgres.start, home)
        await migrate(server.url)
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")},
            "HEADRACE_HOME": str(home),
            "HEADRACE_DATABASE_URL": server.url,
            "OMP_NUM_THREADS": "1",
        }
        settings = Settings.load(environ)
        try:
            fast = [
                await measure(settings, environ, size_mb=size, workers=workers, count=count)
                for size in sizes
            ]
        finally:
            server.stop()
    print(f"p50 <= {P50_S} s and p99 <= {P99_S} s: {'yes' if all(fast) else 'NO'}")
    return 0 if all(fast) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sampler", metavar="RUN", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=float, nargs="+", default=[2, 40], metavar="MB")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--count", type=int, default=30)
    given = vars(parser.parse_args())
    name = given.pop("sampler")
    sys.exit(asyncio.run(main(**given)) if name is None else asyncio.run(sampler(name)))
