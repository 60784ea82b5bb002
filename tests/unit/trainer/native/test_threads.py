"""Helpers share the work of a call, and nothing of a call is left to them when it has returned."""

import threading
from collections.abc import Iterator

import pytest

from trainer.native.threads import _helpers, run_on_threads


@pytest.fixture(autouse=True)
def no_helpers_yet() -> Iterator[None]:
    _helpers.cache_clear()
    yield
    _helpers.cache_clear()


@pytest.mark.parametrize("started", [0, 1])
def test_a_system_that_starts_no_more_threads_leaves_the_work_to_this_one(
    started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its limit of processes or memory. Nothing of the first call may run in the second one."""
    start, left = threading.Thread.start, [started]

    def refuse(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    calls: list[str] = []
    is_shared = threading.Event()

    def first(thread: int) -> None:
        calls.append(f"first {thread}")
        if thread:
            is_shared.wait(10)
        is_shared.set()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        run_on_threads(first, 3)
    assert "first 0" in calls
    assert "first 2" not in calls
    calls.clear()
    both = threading.Barrier(2, timeout=10)

    def second(thread: int) -> None:
        calls.append(f"second {thread}")
        both.wait()

    run_on_threads(second, 2)
    assert sorted(calls) == ["second 0", "second 1"]
