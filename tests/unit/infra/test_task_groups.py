"""A task group leaves the cancellation count of its task as it found it, on every version of Python."""

import asyncio
import sys

import pytest

from infra.task_cancellation import TaskGroup

Group = type[asyncio.TaskGroup]
LEAVES_ONE = sys.version_info < (3, 13)


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("a child")


async def hold(started: asyncio.Event) -> None:
    """A child that fails when it is cancelled."""
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        raise ValueError("a child that is cancelled")


def count() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def leave(group: Group) -> int:
    """Let a child fail while the group is left, and return the count after it."""
    with pytest.raises(ExceptionGroup):
        async with group() as children:
            children.create_task(fail())
    return count()


async def stay(group: Group) -> int:
    """Let a child fail while the body runs, and return the count after it."""
    with pytest.raises(ExceptionGroup):
        await _stay(group)
    return count()


async def _stay(group: Group) -> None:
    async with group() as children:
        children.create_task(fail())
        await asyncio.Event().wait()


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_child_that_fails_leaves_no_cancellation(number: int) -> None:
    for _ in range(number):
        assert await leave(TaskGroup) == 0
        assert await stay(TaskGroup) == 0


async def test_twin_the_library_leaves_one() -> None:
    assert await stay(asyncio.TaskGroup) == 0
    assert await leave(asyncio.TaskGroup) == (1 if LEAVES_ONE else 0)


async def test_nested_groups_leave_no_cancellation() -> None:
    async def nest() -> None:
        async with TaskGroup() as outer:
            outer.create_task(asyncio.sleep(0))
            async with TaskGroup() as inner:
                inner.create_task(fail())

    with pytest.raises(ExceptionGroup):
        await nest()
    assert count() == 0


async def test_a_group_without_errors_returns_its_results() -> None:
    async with TaskGroup() as group:
        task = group.create_task(asyncio.sleep(0, "done"))
    assert (task.result(), count()) == ("done", 0)


async def test_an_error_of_the_body_is_raised() -> None:
    async def work() -> None:
        async with TaskGroup() as group:
            group.create_task(asyncio.Event().wait())
            raise ValueError("the body")

    with pytest.raises(ExceptionGroup):
        await work()
    assert count() == 0


async def _time_out_after(group: Group) -> None:
    async with asyncio.timeout(0.01):
        await leave(group)
        await asyncio.Event().wait()


async def test_a_timeout_around_a_group_is_a_time_out() -> None:
    """It compares the counts before and after."""
    with pytest.raises(TimeoutError):
        await _time_out_after(TaskGroup)
    assert count() == 0


@pytest.mark.skipif(not LEAVES_ONE, reason="this version of asyncio does not leave a cancellation")
async def test_twin_a_timeout_after_a_group_of_the_library_is_a_cancellation() -> None:
    task = asyncio.ensure_future(_time_out_after(asyncio.TaskGroup))
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()


async def test_a_cancelled_task_ends_in_its_group() -> None:
    started = asyncio.Event()

    async def work() -> None:
        async with TaskGroup() as group:
            group.create_task(asyncio.Event().wait())
            started.set()

    task = asyncio.ensure_future(work())
    await started.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()


async def test_a_cancellation_that_meets_an_error_is_raised_at_the_next_await() -> None:
    """The error is raised first, and the count stays."""
    started = asyncio.Event()
    counts = []

    async def work() -> None:
        with pytest.raises(ExceptionGroup):
            async with TaskGroup() as group:
                group.create_task(hold(started))
        counts.append(count())
        await asyncio.sleep(0)

    task = asyncio.ensure_future(work())
    await started.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()
    assert counts == [1]


async def test_a_group_of_a_task_that_is_being_cancelled_adds_nothing() -> None:
    """What cleans up after a cancellation may use groups too."""
    counts = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            with pytest.raises(ExceptionGroup):
                async with TaskGroup() as group:
                    group.create_task(fail())
            counts.append(count())

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()
    assert counts == [1]
