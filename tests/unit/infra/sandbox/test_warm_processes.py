"""Of more hosts than places, each has its turn, and no process with open calls is ended."""

import asyncio
from dataclasses import dataclass, field

import pytest

from infra.sandbox.warm_processes import WarmProcesses


@dataclass(eq=False)
class Process:
    """A process as the places see one: it is alive until it is ended."""

    key: str
    alive: bool = True
    open_calls: int = 0


@dataclass
class Bench:
    """Places, with what happened to processes, and calls that last until they are let go."""

    most: int = 2
    running: set[Process] = field(default_factory=set)
    begun: list[str] = field(default_factory=list)
    most_running: int = 0

    def __post_init__(self) -> None:
        self.warm = WarmProcesses[Process](self.most, end=self.end)

    async def end(self, process: Process) -> None:
        assert process.open_calls == 0, "a busy process was ended"
        await asyncio.sleep(0)
        process.alive = False
        self.running.discard(process)

    async def start(self, key: str) -> Process:
        await asyncio.sleep(0)
        process = Process(key)
        self.running.add(process)
        self.most_running = max(self.most_running, len(self.running))
        return process

    async def call(self, key: str, until: asyncio.Event | None = None) -> Process:
        async with self.warm.hold(key, lambda: self.start(key)) as process:
            process.open_calls += 1
            self.begun.append(key)
            await (until.wait() if until is not None else asyncio.sleep(0.001))
            assert process.alive
            process.open_calls -= 1
            return process


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_twelve_hosts_share_eight_places() -> None:
    bench = Bench(most=8)
    await asyncio.gather(*(bench.call(f"run {n % 12}") for n in range(480)))
    assert len(bench.begun) == 480
    assert bench.most_running == 8


async def test_callers_wait_in_their_order() -> None:
    bench, held = Bench(most=1), asyncio.Event()
    tasks = [asyncio.ensure_future(bench.call("a", held))]
    for key in "bcd":
        await settle()
        tasks.append(asyncio.ensure_future(bench.call(key)))
    await settle()
    assert bench.begun == ["a"]
    held.set()
    await asyncio.gather(*tasks)
    assert bench.begun == ["a", "b", "c", "d"]


async def test_a_host_that_is_never_idle_lets_others_in() -> None:
    bench, first, second = Bench(most=1), asyncio.Event(), asyncio.Event()
    busy = [asyncio.ensure_future(bench.call("busy", first))]
    await settle()
    other = asyncio.ensure_future(bench.call("other"))
    await settle()
    busy.append(asyncio.ensure_future(bench.call("busy", second)))
    await settle()
    first.set()
    async with asyncio.timeout(5):
        await other
    second.set()
    await asyncio.gather(*busy)
    assert bench.begun == ["busy", "other", "busy"]


async def test_a_caller_that_gives_up_takes_no_place() -> None:
    bench, held = Bench(most=1), asyncio.Event()
    first = asyncio.ensure_future(bench.call("a", held))
    await settle()
    gone = asyncio.ensure_future(bench.call("b"))
    await settle()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    same = asyncio.ensure_future(bench.call("a"))
    async with asyncio.timeout(5):
        await same
    held.set()
    await first
    assert bench.begun == ["a", "a"]


async def test_the_process_that_is_idle_for_longest_ends_first() -> None:
    bench = Bench(most=2)
    first, second = [await bench.call(key) for key in "ab"]
    assert await bench.call("a") is first
    await bench.call("c")
    assert (first.alive, second.alive) == (True, False)


async def test_a_start_that_fails_leaves_the_place_to_others() -> None:
    bench = Bench(most=1)

    async def fail() -> Process:
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        async with bench.warm.hold("a", fail):
            pass
    async with asyncio.timeout(5):
        await bench.call("b")
        await bench.call("a")
