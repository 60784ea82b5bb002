"""Two to four runtimes that host the same consumers end in the same streams as one, whichever is
faster, and whatever each still remembers of streams that the others have moved."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.spine.memory.event_log import MemoryLog
from infra.spine.ports.event_log import Commit
from tests.kit import virtual
from tests.kit.property_examples import examples
from tests.kit.several import ALONE, Crowd, stream_texts_of
from tests.properties.test_cascade import MODE, events


@cache
def reference(mode: str) -> list[str]:
    return virtual.run(stream_texts_of(ALONE, events(mode)))


@examples(15)
@given(MODE, st.integers(0, 2**32))
def test_several_runtimes_end_in_the_streams_of_one(mode: str, seed: int) -> None:
    assert sum("rl.run.finished" in line for line in reference(mode)) == 1
    assert virtual.run(stream_texts_of(Crowd.from_seed(seed), events(mode))) == reference(mode)


def test_twin_without_the_versions_that_were_read_they_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = MemoryLog._check

    def what_grows_alone(log: MemoryLog, commit: Commit) -> None:
        grows = {new.stream for new in commit.events}
        expected = {s: v for s, v in (commit.expected or {}).items() if s in grows}
        check(log, replace(commit, expected=expected))

    expected = reference("sync")
    monkeypatch.setattr(MemoryLog, "_check", what_grows_alone)
    crowds = [Crowd.from_seed(seed) for seed in range(20)]
    assert any(virtual.run(stream_texts_of(crowd, events("sync"))) != expected for crowd in crowds)
