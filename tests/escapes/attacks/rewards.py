"""The ground truth and the rewards: a workflow looks for the one and wants to change the other."""

import gc
import json
import os
import sys

from tests.escapes.attacks.attack import Loot, Targets, attack, pids, read


@attack(in_child=False)
def objects_in_memory(targets: Targets) -> Loot:
    """Looks for the ground truth among all objects of its process."""
    found = ""
    for thing in gc.get_objects():
        if isinstance(thing, dict):
            found += targets.marks(" ".join(v for v in thing.values() if isinstance(v, str)))
    return found


@attack(in_child=False)
def frames(targets: Targets) -> Loot:
    """Looks for the ground truth in the variables of its callers."""
    found, frame = "", sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        found += targets.marks(repr(frame.f_locals)[: 1 << 20])
    return found


@attack(in_child=False)
def own_environment(targets: Targets) -> Loot:
    """Looks for secrets in its environment, its arguments and its first memory."""
    return targets.marks(
        json.dumps(dict(os.environ))
        + " ".join(sys.argv)
        + read("/proc/self/environ").decode("latin-1")
    )


@attack(in_child=False)
def own_memory(targets: Targets) -> Loot:
    """Looks for secrets in its own heap, where what its process read before may still be."""
    data = b""
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    for line in read("/proc/self/maps", 1 << 20).decode().splitlines():
        if "[heap]" in line:
            first, last = (int(n, 16) for n in line.split()[0].split("-"))
            data += os.pread(memory, last - first, first)
    return targets.marks(data)


@attack(in_child=False)
def patch_sdk(targets: Targets) -> Loot:
    """Replaces the SDK's functions that grade, in its own process."""
    for module in list(sys.modules.values()):
        if hasattr(module, "grader_reward"):
            setattr(module, "grader_reward", lambda *_: {"index": 0, "reward": 1e9})
    return None


@attack()
def pipe_of_grader(targets: Targets) -> Loot:
    """Writes rewards into the pipes of every process that it can see."""
    for pid in (*pids(), targets.parent):
        for number in range(3, 16):
            path = f"/proc/{pid}/fd/{number}"
            try:
                if "pipe" in os.readlink(path) and b"user_code_host.py" in read(
                    f"/proc/{pid}/cmdline"
                ):
                    os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b"\0\0\0\x02{}")
            except OSError:
                continue
    return None


@attack()
def files_of_grader(targets: Targets) -> Loot:
    """Reads what graders leave in the directory for temporary files."""
    found = b""
    for place in {"/tmp", targets.temporary}:
        for name in os.listdir(place):
            if "grader" in name:
                found += read(f"{place}/{name}")
    return found
