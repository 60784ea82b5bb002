"""Snapshots of folded states are saved as a stream grows, so that a start after a crash is quick
however long the history is; a long history is read in pages."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from infra.spine.memory.event_log import MemoryLog
from infra.spine.runtime import folded_states, performer
from infra.spine.runtime.consumer import AnyConsumer
from infra.spine.runtime.folded_states import StateCache
from schemas.ids import checkpoint_stream
from tests.kit.hosting import Bench, Script, consumer

EVERY = 5
STREAM = checkpoint_stream("r")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded_states, "SNAPSHOT_EVERY", EVERY)
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.05)


def counting(script: Script) -> AnyConsumer:
    """A consumer whose state is the number of events in its stream, and can be saved."""
    return replace(consumer(script), snapshots=int)


async def folded_anew(bench: Bench) -> tuple[int, int]:
    """(the state, the number of events folded for it) in a process that has just started."""
    seen: list[object] = []
    anew = counting(Script(on_fold=seen.append))
    loaded = await StateCache(cast("Any", bench.log)).load({STREAM: anew})
    return loaded[STREAM].state, len(seen)


def _has_seen(bench: Bench, count: int) -> bool:
    return len(bench.seen("r")) == count


async def lived(bench: Bench, count: int) -> None:
    """One process makes this many decisions one after the other, and keeps the stream in memory."""
    async with bench.running():
        for n in range(1, count + 1):
            await bench.warn("r", n)
            await bench.until(partial(_has_seen, bench, n))


async def test_a_process_that_lives_long_saves_snapshots_on_its_way(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [counting(Script())])
    await lived(bench, 23)
    state, folded = await folded_anew(bench)
    assert state == 23
    assert folded <= EVERY + 1


async def test_a_snapshot_that_cannot_be_saved_is_saved_later(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [counting(Script())])
    bench.log.before["save_snapshot"] = 3
    await lived(bench, 14)
    state, folded = await folded_anew(bench)
    assert state == 14
    assert folded <= EVERY + 1


async def test_a_consumer_without_snapshots_folds_everything(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [consumer(Script())])
    await lived(bench, 14)
    loaded = await StateCache(MemoryLog(bench.world)).load({STREAM: consumer(Script())})
    assert loaded[STREAM].state == loaded[STREAM].version == 14


@pytest.mark.parametrize("page", [1, 3, 4, 11, 100])
async def test_a_long_history_is_read_in_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(folded_states, "PAGE", page)
    bench = Bench(tmp_path, [consumer(Script())])
    async with bench.running():
        await bench.warn("r", *range(1, 8))
        await bench.warn("other", *range(1, 5))
        await bench.until(lambda: len(bench.seen("r")) == 7 and len(bench.seen("other")) == 4)
    wanted = {STREAM: counting(Script()), checkpoint_stream("other"): counting(Script())}
    loaded = await StateCache(MemoryLog(bench.world)).load(wanted)
    assert {stream: folded.state for stream, folded in loaded.items()} == {
        STREAM: 7,
        checkpoint_stream("other"): 4,
    }
