"""The entry point of the attacking rollout: a workflow and a grader that run the attack that they are
asked for. It is copied into the rollout's tree as main.py, beside the attacks."""

import asyncio
import fcntl
import importlib
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

from headrace import AgentWorkflow, Grader, GraderContext, WorkflowContext
from tests.escapes.attacks.attack import ATTACKS, CLAIM, Attack, Loot, Targets

CHILD_S = 5.0
PIPE = 1 << 20
SET_PIPE_SIZE = 1031

ATTACK_FILES = Path(__file__).parent / "tests" / "escapes" / "attacks"
for file in sorted(ATTACK_FILES.glob("*.py")):
    if file.stem not in ("__init__", "attack"):
        importlib.import_module(f"tests.escapes.attacks.{file.stem}")


async def perform(name: str, targets: Targets) -> str:
    """Run an attack, and return what it found. An attack that is refused finds nothing."""
    if name == "innocent":
        return await innocent()
    if not ATTACKS[name].in_child:
        return _text(ATTACKS[name].run(targets))
    reading, writing = os.pipe()
    fcntl.fcntl(writing, SET_PIPE_SIZE, PIPE)
    child = os.fork()
    if child == 0:
        _in_child(ATTACKS[name], targets, writing)
    os.close(writing)
    until = time.monotonic() + CHILD_S
    while not _ended(child):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        await asyncio.sleep(0.003)
    os.set_blocking(reading, False)
    try:
        return os.read(reading, PIPE).decode("latin-1")
    except BlockingIOError:
        return ""
    finally:
        os.close(reading)


def _in_child(attack: Attack, targets: Targets, writing: int) -> None:
    try:
        found = _text(attack.run(targets)) or " "
        if len(found) > PIPE // 2:
            found = targets.marks(found)
        os.write(writing, found.encode("latin-1", errors="replace"))
    except BaseException as error:
        os.write(writing, f"refused: {error!r}"[:500].encode("latin-1", errors="replace"))
    finally:
        os._exit(0)


def _ended(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] == child
    except ChildProcessError:
        return True


def _text(found: Loot) -> str:
    return found.decode("latin-1") if isinstance(found, bytes) else found or ""


async def innocent() -> str:
    """Everything that an ordinary attempt may want: a process, a thread, a file and memory."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"forked")
        os._exit(0)
    started = threading.Event()
    threading.Thread(target=started.set).start()
    with tempfile.TemporaryFile() as file:
        file.write(bytearray(1 << 20))
    os.waitpid(child, 0)
    return os.read(reading, 100).decode() if started.wait(5.0) else "no thread"


class Escape(AgentWorkflow):
    """Answers with what the attack found."""

    async def run(self, ctx: WorkflowContext) -> list[dict[str, object]]:
        targets = Targets(**json.loads(str(ctx.metadata["targets"])))
        try:
            found = await perform(str(ctx.prompt[0]["content"]), targets)
        except OSError as error:
            found = repr(error)
        return [{"role": "assistant", "content": found}]


class Judge(Grader):
    """Raises what the attack found. Without an attack it keeps the ground truth for a while."""

    async def grade(self, ctx: GraderContext) -> None:
        if "attack" not in ctx.metadata:
            await asyncio.sleep(float(str(ctx.metadata["hold_s"])))
            for name in ctx.samples:
                ctx.set_sample_reward(name, 0.25)
            return
        targets = Targets(**json.loads(str(ctx.metadata["targets"])))
        found = await perform(str(ctx.metadata["attack"]), targets)
        for name in ctx.samples:
            ctx.set_sample_reward(name, 0.25)
        raise RuntimeError(targets.marks(found) or found[found.find(CLAIM) :] or "nothing")
