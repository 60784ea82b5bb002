"""On the path of the processes of a chaos trial only: SIGUSR1 makes them say what each of their threads
and asyncio tasks waits for, into their log."""

import asyncio
import signal
import sys
import traceback
from types import FrameType


def say(number: int, frame: FrameType | None) -> None:
    """Write the stacks of all threads and tasks to standard error."""
    print("--- what this process waits for", file=sys.stderr)
    for thread, top in sys._current_frames().items():
        print(f"thread {thread}", file=sys.stderr)
        traceback.print_stack(top, file=sys.stderr)
    try:
        tasks = asyncio.all_tasks(asyncio.get_running_loop())
    except RuntimeError:
        tasks = set()
    for task in tasks:
        print(f"cancelling {task.cancelling()}", file=sys.stderr)
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()


signal.signal(signal.SIGUSR1, say)
