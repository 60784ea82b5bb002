"""A breakpoint in `trainer/grpo.py` stops a real run, with the batch and the policy in its frame."""

import asyncio
import bdb
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.kit.in_memory import in_memory
from tests.kit.platform import ROWS, make_workspace, run_config
from trainer import grpo

pytestmark = [pytest.mark.processes, pytest.mark.torch]

STEPS, GROUPS = 2, 2


class Debugger(bdb.Bdb):
    """Stops at its breakpoints only. It notes what is in the frame and lets the run go on."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: list[tuple[str, str, int]] = []
        self.reset()
        self.botframe = sys._getframe()
        self.set_continue()

    def user_line(self, frame: FrameType) -> None:
        groups = frame.f_locals["groups"]
        self.stops.append((frame.f_code.co_name, threading.current_thread().name, len(groups)))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Debug every thread that starts until the block ends."""
        threading.settrace(self.trace_dispatch)
        try:
            yield
        finally:
            threading.settrace(None)
            self.clear_all_breaks()


def line_of(text: str) -> int:
    """The line of `grpo.step` in which this stands."""
    lines, first = inspect.getsourcelines(grpo.step)
    [found] = [n for n, line in enumerate(lines, start=first) if text in line]
    return found


def test_a_breakpoint_in_the_step_stops_a_real_run(tmp_path: Path) -> None:
    debugger = Debugger()
    assert debugger.set_break(grpo.__file__, line_of("optimizers.update(")) is None
    workspace = make_workspace(tmp_path / "workspace")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROWS)
    config = run_config(training={"rollout_batch_size": GROUPS}, advanced={"max_steps": STEPS})

    async def finished() -> None:
        async with in_memory(tmp_path / "home") as started, asyncio.timeout(360):
            await started.workspaces.add(str(workspace), "w")
            await started.upload("numbers", rows)
            await started.run_to_end(config, workspace="w")

    with debugger.attached():
        asyncio.run(finished())
    assert [(name, groups) for name, _, groups in debugger.stops] == [("step", GROUPS)] * STEPS
    assert all(thread.startswith("device") for _, thread, _ in debugger.stops)
