"""A message that no consumer can process is put aside whole; its neighbours are processed, and it
is retried on request."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.spine.memory.event_log import MemoryLog
from infra.spine.runtime import performer
from infra.spine.runtime.consumer import NOTHING, Decision
from infra.spine.runtime.dead_letters import PAYLOAD_JSON_BYTES
from infra.spine.runtime.quarantine import TRIES
from schemas.effects import Failed
from schemas.events import MAX_EVENT_BYTES, CheckpointFailed, MessageDeadLettered, MessageRedriven
from schemas.ids import EventId, checkpoint_stream
from tests.kit.hosting import Bench, Script, consumer


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here notifies the runtime that a run was released, so it polls often."""
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.05)


def refuse(run: str) -> Callable[[object], None]:
    """Raise for every message of this run."""

    def check(event: object) -> None:
        if getattr(event, "run", getattr(getattr(event, "effect", None), "run_id", "")) == run:
            raise ZeroDivisionError("a bug")

    return check


def redrive(letter: MessageDeadLettered, letter_id: EventId) -> MessageRedriven:
    return MessageRedriven(
        consumer=letter.consumer,
        letter=letter_id,
        message_id=letter.message_id,
        message_stream=letter.message_stream,
        message_version=letter.message_version,
        about=letter.about,
        paused=letter.pauses,
    )


async def test_a_record_that_cannot_be_decoded_is_put_aside_and_nothing_pauses(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, [consumer(Script())])
    (bad,) = await bench.warn("bad", 1)
    await bench.warn("good", 1, 2)
    bench.spoil(bad, '{"run": "bad", "step": "\\u0000 none"}')
    async with bench.running():
        await bench.until(lambda: bench.seen("good") == [1, 2] and len(bench.letters()) == 1)
    (letter,) = bench.letters()
    assert letter.consumer == "bench"
    assert letter.message_id == bad.id
    assert json.loads(letter.payload)["step"] == "\0 none"
    assert "step" in letter.cause
    assert letter.headers["ce_subject"] == "run-bad"
    assert letter.content is None
    assert bench.gates("bad", "good") == {"bad": "open", "good": "open"}


async def test_a_raising_decider_holds_its_run_alone(tmp_path: Path) -> None:
    script = Script(on_event=refuse("bad"))
    bench = Bench(tmp_path, [consumer(script)])
    await bench.warn("good", 1)
    (bad,) = await bench.warn("bad", 1)
    await bench.warn("good", 2)
    async with bench.running():
        await bench.until(lambda: bench.seen("good") == [1, 2] and len(bench.letters()) == 1)
    (letter,) = bench.letters()
    assert (letter.message_id, letter.pauses) == (bad.id, True)
    assert "ZeroDivisionError: a bug" in letter.cause
    assert "on_event" in letter.trace
    assert bench.gates("bad", "good") == {"bad": "paused", "good": "open"}
    assert (consumer(script).name, bad.id) in bench.world.inbox


async def test_a_message_whose_stream_moves_before_the_dead_letter_is_decided_on(
    tmp_path: Path,
) -> None:
    """Each attempt fails because of the stream's state; before the dead letter is written, another
    process appends the missing event."""
    script, raised = Script(), []
    bench = Bench(tmp_path, [consumer(script)])

    def lacks(event: object) -> None:
        if bench.world.version(checkpoint_stream("bad")):
            return
        raised.append(event)
        if len(raised) == TRIES:
            appended = bench.write(CheckpointFailed(run="bad", step=0, message="what it lacks"))
            with pytest.raises(StopIteration):
                appended.send(None)
        raise ZeroDivisionError("too early")

    script.on_event = lacks
    await bench.warn("bad", 1)
    async with bench.running():
        await bench.until(lambda: bench.seen("bad") == [0, 1])
    assert len(raised) == TRIES
    assert bench.letters() == []
    assert bench.gates("bad") == {"bad": "open"}


async def test_a_raising_fold_of_its_own_events_is_put_aside_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [consumer(Script(on_fold=refuse("bad")))])
    await bench.warn("bad", 1)
    await bench.warn("good", 1)
    async with bench.running():
        await bench.until(lambda: bench.seen("good") == [1] and len(bench.letters()) == 1)
    assert bench.seen("bad") == []


async def test_a_message_whose_stream_nobody_can_name_is_put_aside(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [consumer(Script(on_route=refuse("bad")))])
    await bench.warn("bad", 1)
    await bench.warn("good", 1)
    async with bench.running():
        await bench.until(lambda: bench.seen("good") == [1] and len(bench.letters()) == 1)
    assert bench.letters()[0].pauses


async def test_an_unreadable_stream_stops_nothing_else(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [consumer(Script())])
    await bench.write(CheckpointFailed(run="bad", step=0, message="x"))
    spoilt = next(r for r in bench.world.events if r.stream == checkpoint_stream("bad"))
    bench.spoil(spoilt, "{}")
    await bench.warn("bad", 1)
    await bench.warn("good", 1)
    async with bench.running():
        await bench.until(lambda: bench.seen("good") == [1] and len(bench.letters()) == 1)
    assert "cannot be folded" in bench.letters()[0].cause


async def test_a_decision_too_large_to_write_is_put_aside(tmp_path: Path) -> None:
    script = Script()
    bench = Bench(tmp_path, [consumer(script)])

    def grow(event: object) -> None:
        script.message = "x" * (MAX_EVENT_BYTES + 1) if getattr(event, "run", "") == "bad" else "s"

    script.on_event = grow
    await bench.warn("bad", 1)
    await bench.warn("good", 1)
    async with bench.running():
        await bench.until(lambda: bench.seen("good") == [1] and len(bench.letters()) == 1)
    assert "an event may have" in bench.letters()[0].cause


async def test_a_failure_in_the_cascade_is_left_to_the_bus_with_its_cause(
    tmp_path: Path,
) -> None:
    """Two consumers share a process; the second one cannot decide on the events that the first one
    emits."""
    first, second = Script(), Script(on_event=refuse("bad"))
    reader = replace(
        consumer(second, name="second"),
        reads=(CheckpointFailed,),
        category="policy",
        routes=lambda event: (event.stream.replace("checkpoint", "policy"),),
        handle=lambda state, message, meta: _seen(second, message),
    )
    bench = Bench(tmp_path, [consumer(first), reader])
    await bench.warn("bad", 1)
    await bench.warn("good", 1)
    async with bench.running():
        await bench.until(lambda: bench.seen("good") == [1] and len(bench.letters()) == 1)
    assert bench.seen("bad") == [1], "what the first one decided is kept"
    assert bench.letters()[0].consumer == "second"


def _seen(script: Script, message: Any) -> Decision:
    script.on_event(message)
    return NOTHING


async def test_an_outcome_nobody_can_decide_on_holds_its_run_and_is_performed_again(
    tmp_path: Path,
) -> None:
    script = Script(asks=True, on_outcome=refuse("bad"))
    bench = Bench(tmp_path, [consumer(script)])
    await bench.warn("bad", 1)
    await bench.warn("good", 1)
    async with bench.running():
        await bench.until(lambda: len(bench.seen("good")) == 1 and len(bench.letters()) == 1)
        (letter,) = bench.letters()
        assert letter.message_type == "FetchCommit"
        assert bench.gates("bad") == {"bad": "paused"}
        assert len(bench.world.effects) == 1
        script.on_outcome = lambda outcome: None
        await bench.write(redrive(letter, _id_of(bench, letter)))
        await bench.until(lambda: len(bench.seen("bad")) == 1, within_s=20)
    assert script.performed.count("bad") == 2
    assert bench.world.effects == {}


async def test_an_outcome_that_the_log_cannot_hold_is_a_failure_of_its_effect(
    tmp_path: Path,
) -> None:
    """Who waits for it is answered, and its run is not held: hostile code may decide what it holds."""
    script = Script(asks=True, outcome="x" * (MAX_EVENT_BYTES + 1))
    bench = Bench(tmp_path, [consumer(script)])
    await bench.warn("bad", 1)
    async with bench.running():
        await bench.until(lambda: len(bench.seen("bad")) == 1)
    (said,) = [r.event for r in bench.world.events if isinstance(r.event, CheckpointFailed)]
    assert said.message.startswith("its result cannot be recorded: ")
    assert "an event may have" in said.message
    assert bench.letters() == []
    assert bench.gates("bad") == {"bad": "open"}
    assert bench.world.effects == {}


async def test_a_failure_that_the_log_cannot_hold_is_put_aside(tmp_path: Path) -> None:
    script = Script(asks=True, outcome="x" * (MAX_EVENT_BYTES + 1))
    bench = Bench(tmp_path, [replace(consumer(script), handle=_always_long(script))])
    await bench.warn("bad", 1)
    async with bench.running():
        await bench.until(lambda: len(bench.letters()) == 1)
    assert bench.gates("bad") == {"bad": "paused"}


def _always_long(script: Script) -> Any:
    usual = consumer(script).handle

    def handle(state: Any, message: Any, meta: Any) -> Decision:
        long = "x" * (MAX_EVENT_BYTES + 1)
        changed = replace(message, message=long) if isinstance(message, Failed) else message
        return usual(state, changed, meta)

    return handle


async def test_redriven_it_reaches_its_consumer_alone_and_releases_the_run(tmp_path: Path) -> None:
    script, neighbour = Script(on_event=refuse("bad")), Script()
    other = consumer(neighbour, name="neighbour")
    bench = Bench(tmp_path, [consumer(script)])
    (bad,) = await bench.warn("bad", 1)
    async with bench.running():
        await bench.until(lambda: len(bench.letters()) == 1)
    script.on_event = lambda event: None
    letter = bench.letters()[0]
    await MemoryLog(bench.world).advance([consumer(script).name], bench.world.events[-1].cursor)
    bench.world.inbox.clear()
    bench.world.watermarks[other.name] = bench.world.events[-1].cursor
    bench.world.inbox[(other.name, bad.id)] = 1
    bench.consumers = [consumer(script), other]
    bench.world.inbox[(consumer(script).name, bad.id)] = 1
    await bench.write(redrive(letter, _id_of(bench, letter)))
    assert bench.gates("bad") == {"bad": "open"}
    async with bench.running():
        await bench.until(lambda: bench.seen("bad") == [1])
    (counted,) = [r for r in bench.world.events if r.stream == checkpoint_stream("bad")]
    assert counted.causation == bad.id, "what follows, follows from the message itself"
    async with bench.running():
        await bench.warn("good", 1)
        await bench.until(lambda: 1 in bench.seen("good"))
    assert bench.seen("bad") == [1]


async def test_redriven_in_vain_it_is_another_letter_and_can_be_driven_again(
    tmp_path: Path,
) -> None:
    script = Script(on_event=refuse("bad"))
    bench = Bench(tmp_path, [consumer(script)])
    await bench.warn("bad", 1)
    async with bench.running():
        await bench.until(lambda: len(bench.letters()) == 1)
        first = bench.letters()[0]
        await bench.write(redrive(first, _id_of(bench, first)))
        await bench.until(lambda: len(bench.letters()) == 2)
        assert bench.gates("bad") == {"bad": "paused"}
        script.on_event = lambda event: None
        second = bench.letters()[1]
        ids = {r.id for r in bench.world.events if r.event == second or r.event == first}
        assert len(ids) == 2
        await bench.write(redrive(second, _id_of(bench, second, last=True)))
        await bench.until(lambda: bench.seen("bad") == [1])
    assert bench.gates("bad") == {"bad": "open"}


async def test_a_run_with_two_letters_is_held_until_both_are_driven_again(tmp_path: Path) -> None:
    script = Script(on_event=refuse("bad"))
    bench = Bench(tmp_path, [consumer(script)])
    await bench.warn("bad", 1, 2)
    async with bench.running():
        await bench.until(lambda: len(bench.letters()) == 2)
        script.on_event = lambda event: None
        one, two = bench.letters()
        await bench.write(redrive(one, _id_of(bench, one)))
        await bench.until(lambda: bench.seen("bad") == [1])
        assert bench.gates("bad") == {"bad": "paused"}
        await bench.write(redrive(two, _id_of(bench, two, last=True)))
        await bench.until(lambda: bench.seen("bad") == [1, 2])
    assert bench.gates("bad") == {"bad": "open"}


@pytest.mark.parametrize("character", ["x", '"', "\x01", "ü", "\N{GRINNING FACE}"])
async def test_bytes_of_any_size_and_kind_are_kept(tmp_path: Path, character: str) -> None:
    """A dead letter is always small enough to be written; the part that it does not show is an
    artifact."""
    bench = Bench(tmp_path, [consumer(Script())])
    (bad,) = await bench.warn("bad", 1)
    data = json.dumps({"run": "bad", "step": "none", "more": character * 60_000})
    bench.spoil(bad, data)
    async with bench.running():
        await bench.until(lambda: len(bench.letters()) == 1)
    (letter,) = bench.letters()
    assert len(json.dumps(letter.payload)) <= PAYLOAD_JSON_BYTES
    assert letter.content is not None
    assert bench.world.artifacts[letter.content.sha256].decode() == data


def _id_of(bench: Bench, letter: MessageDeadLettered, *, last: bool = False) -> EventId:
    found = [r.id for r in bench.world.events if r.event == letter]
    return EventId(found[-1 if last else 0])
