"""A message is put aside by itself when the database rejects its decision, as when its decider
raises."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.spine.memory.event_log import MemoryLog
from infra.spine.ports.event_log import Commit, CommitRefused, Encoded, Recorded
from infra.spine.runtime import performer
from infra.spine.runtime.consumer import Decision
from schemas.events import CheckpointFailed, PolicyFailed
from tests.kit.hosting import Bench, Fetched, Flaky, Script, consumer

POISON = "poison"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here notifies the runtime that a run was released, so it polls often."""
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.05)


class Picky(MemoryLog):
    """A log that cannot hold a certain text, and does not say in which event it found it."""

    commits = 0

    async def commit(self, commit: Commit) -> Sequence[Recorded]:
        self.commits += 1
        if any(getattr(new.event, "message", "") == POISON for new in commit.events):
            raise CommitRefused("a constraint")
        return await super().commit(commit)


def picky(tmp_path: Path, consumers: Sequence[Any]) -> tuple[Bench, Picky]:
    bench = Bench(tmp_path, consumers)
    log = Picky(bench.world)
    bench.log = Flaky(log)
    return bench, log


def poisoned(script: Script, *, name: str = "bench") -> Any:
    """The bench's consumer; its decision about the run `bad` cannot be stored."""
    made = consumer(script, name=name)

    def handle(state: int, message: Any, meta: Any) -> Decision:
        run = message.effect.run_id if isinstance(message, Fetched) else message.run
        decision = made.handle(state, message, meta)
        text = POISON if run == "bad" else "seen"
        events = tuple(e.model_copy(update={"message": text}) for e in decision.events)
        return replace(decision, events=events)

    return replace(made, handle=handle)


async def test_one_in_a_batch_is_put_aside_and_its_neighbours_go_on(tmp_path: Path) -> None:
    bench, log = picky(tmp_path, [poisoned(Script())])
    await bench.warn("good", *range(20))
    (bad,) = await bench.warn("bad", 1)
    await bench.warn("good", *range(20, 50))
    async with bench.running():
        await bench.until(lambda: len(bench.seen("good")) == 50 and len(bench.letters()) == 1)
    (letter,) = bench.letters()
    assert bench.seen("good") == list(range(50))
    assert bench.seen("bad") == []
    assert (letter.message_id, letter.pauses, letter.consumer) == (bad.id, True, "bench")
    assert "a constraint" in letter.cause
    assert bench.gates("bad", "good") == {"bad": "paused", "good": "open"}
    assert log.commits < 20, "it is found by halves"


async def test_an_outcome_is_put_aside_and_its_run_held(tmp_path: Path) -> None:
    bench, _ = picky(tmp_path, [poisoned(Script(asks=True))])
    await bench.warn("bad", 1)
    await bench.warn("good", 1)
    async with bench.running():
        await bench.until(lambda: len(bench.seen("good")) == 1 and len(bench.letters()) == 1)
    assert bench.letters()[0].message_type == "FetchCommit"
    assert bench.gates("bad") == {"bad": "paused"}
    assert len(bench.world.effects) == 1


async def test_a_refused_cascade_is_left_to_the_bus_with_its_cause(
    tmp_path: Path,
) -> None:
    """Two consumers share a process; the decision of the second one cannot be stored."""

    def follow(state: int, message: CheckpointFailed, meta: Any) -> Decision:
        text = POISON if message.run == "bad" else "seen"
        return Decision(events=(PolicyFailed(run=message.run, step=1, kind="error", message=text),))

    reader = replace(
        consumer(Script(), name="second"),
        reads=(CheckpointFailed,),
        category="policy",
        routes=lambda event: (event.stream.replace("checkpoint", "policy"),),
        handle=follow,
    )
    bench, _ = picky(tmp_path, [consumer(Script()), reader])
    await bench.warn("bad", 1)
    await bench.warn("good", 1)
    async with bench.running():
        await bench.until(lambda: bool(_failed(bench)) and len(bench.letters()) == 1)
    assert (bench.seen("bad"), bench.seen("good")) == ([1], [1]), "what the first decided is kept"
    assert bench.letters()[0].consumer == "second"
    assert _failed(bench) == ["good"]


def _failed(bench: Bench) -> list[str]:
    return [event.run for event in bench.told() if isinstance(event, PolicyFailed)]


class Ascii(MemoryLog):
    """A log that holds nothing but ASCII, like a database of another encoding."""

    async def commit(self, commit: Commit) -> Sequence[Recorded]:
        if not all(new.event.model_dump_json().isascii() for new in commit.events):
            raise CommitRefused("it has no equivalent in encoding LATIN1")
        return await super().commit(commit)


async def test_the_letter_itself_is_written_in_what_the_database_can_hold(tmp_path: Path) -> None:
    script = Script()
    script.on_event = lambda event: setattr(script, "message", event.message)
    bench = Bench(tmp_path, [consumer(script)])
    bench.log = Flaky(Ascii(bench.world))
    (bad,) = await bench.warn("bad", 1)
    assert isinstance(bad.payload, Encoded)
    data = str(bad.payload.data).replace("look", "渠 look")
    bench.spoil(bad, data)
    async with bench.running():
        await bench.until(lambda: len(bench.letters()) == 1)
    (letter,) = bench.letters()
    assert "\\u6e20 look" in letter.payload
    assert letter.content is not None
    assert bench.world.artifacts[letter.content.sha256].decode() == data
