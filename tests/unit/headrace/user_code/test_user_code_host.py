"""The host: the memory of its reads, its rest without calls, and what it says about user code."""

import asyncio
import ctypes
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.grading import GraderContext, Sample, place_of_reward
from headrace.user_code import user_code_host as host
from headrace.user_code.discovery import load
from tests.kit.platform import ROOT

BUFFERS = 64
ALLOCATE = f"""
import ctypes
from headrace.user_code import user_code_host as host

class Mallinfo(ctypes.Structure):
    _fields_ = [(f"n{{{{n}}}}", ctypes.c_int) for n in range(10)]  # the fourth counts mappings

mallinfo = ctypes.CDLL(None).mallinfo
mallinfo.restype = Mallinfo
{{first}}
before = mallinfo().n3
buffers = [bytes(256 << 10) for _ in range({BUFFERS})]
print(mallinfo().n3 - before)
"""
needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo"), reason="this C library does not count mappings"
)


def mappings(first: str) -> int:
    """How many of the buffers got a mapping of their own."""
    ran = subprocess.run(
        [sys.executable, "-c", ALLOCATE.format(first=first)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    )
    return int(ran.stdout)


@needs_glibc
def test_a_buffer_of_a_read_is_not_mapped() -> None:
    assert mappings("host.keep_freed_memory()") == 0


@needs_glibc
def test_twin_otherwise_it_is() -> None:
    assert mappings("") > BUFFERS / 2


async def test_a_process_without_calls_is_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, woken = asyncio.get_running_loop(), asyncio.Event()
    wake = loop.call_soon_threadsafe

    def woken_by_the_watch(turn: Callable[[], object]) -> asyncio.Handle:
        wake(woken.set)
        return wake(turn)

    monkeypatch.setattr(host, "BEAT_S", 0.01)
    monkeypatch.setattr(loop, "call_soon_threadsafe", woken_by_the_watch)
    watch = host.Watch(loop, host.Channel(-1), Path("main.py"))
    await asyncio.sleep(0.2)
    assert not woken.is_set()

    running = {loop.create_task(asyncio.sleep(60))}
    watch.watch(running)
    await asyncio.wait_for(woken.wait(), 60)
    watch.watch(set())
    running.pop().cancel()
    await asyncio.sleep(0.1)  # its last beat
    loop.set_task_factory(None)


def test_an_import_that_does_not_end_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "SLOW_IMPORT_S", 0.01)
    entry = tmp_path / "rollouts" / "x" / "main.py"
    entry.parent.mkdir(parents=True)
    entry.write_text("import time\ntime.sleep(0.5)\n")
    host._tell_slow_import(entry, threading.Event())
    load(entry)
    assert 'rollouts/x/main.py", line 2, in <module>' in capfd.readouterr().err
    loaded = threading.Event()
    loaded.set()
    host._tell_slow_import(entry, loaded)
    load(entry)
    assert capfd.readouterr().err == ""


def test_a_grader_that_sets_no_reward_is_named(tmp_path: Path) -> None:
    sample = Sample(name="a", index=0, text="", messages=[])
    context = GraderContext(label=None, metadata={}, samples={"a": sample})
    entry = tmp_path / "main.py"
    grade = host._set_reward(sample, context, who="Check.grade (main.py:3)", entry=entry)
    assert grade["reward"] is None
    assert grade["error"].startswith("Check.grade (main.py:3) set no reward for this sample; call")
    context.set_sample_reward("a", 0.5)
    assert host._set_reward(sample, context, who="Check.grade", entry=entry)["reward"] == 0.5


GRADER = """
import math
from headrace import Grader

class Check(Grader):
    async def grade(self, ctx):
        # the line of the call is named, not that of `grade`
        ctx.set_sample_reward("a", math.nan)
        ctx.set_sample_reward("b", "good")
"""


async def test_a_reward_that_is_no_number_is_named_with_the_line_that_set_it(
    tmp_path: Path,
) -> None:
    entry = tmp_path / "rollouts" / "x" / "main.py"
    entry.parent.mkdir(parents=True)
    entry.write_text(GRADER)
    names = [{"name": n, "index": i, "text": "", "messages": []} for i, n in enumerate("ab")]
    message: host.Json = {"samples": names, "rewards": [], "label": None, "metadata": {}}
    grades = (await host.grader_call(load(entry), entry)(message))["grades"]
    assert [grade["error"] for grade in grades] == [
        "Check.grade (rollouts/x/main.py:8) set the reward to nan; set a finite number as the reward",
        "Check.grade (rollouts/x/main.py:9) set the reward to str 'good'; set a number as the reward",
    ]


def test_the_line_that_sets_the_only_reward_is_known() -> None:
    sample = Sample(name="a", index=0, text="", messages=[])
    context = GraderContext(label=None, metadata={}, samples={"a": sample})
    here = inspect.currentframe()
    assert here is not None
    context.set_reward(1.0)
    assert place_of_reward(context, "a") == (__file__, here.f_lineno - 1)
