"""More rights: programs that run as root, capabilities, and namespaces in which one is root."""

import ctypes
import os

from tests.escapes.attacks.attack import Loot, Targets, attack, call, claim, libc, output_of, read

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME = (
    0x20000,
    0x2000000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
    0x80,
)
MOUNT, UMOUNT, PIVOT, CLONE3, FSOPEN, OPEN_TREE = 165, 166, 155, 435, 430, 428


@attack()
def sudo(targets: Targets) -> Loot:
    """Becomes root with sudo, su or pkexec."""
    said = output_of("sudo", "-n", "id", "-u") + output_of("su", "-c", "id -u")
    return claim("it is root") if "\n0\n" in f"\n{said}" else None


@attack()
def setuid_program(targets: Targets) -> Loot:
    """Runs a program that belongs to root and has the setuid bit."""
    said = output_of(f"{targets.outside}/root-id", "-u")
    return claim("it is root") if said.strip() == "0" else None


@attack()
def setuid_programs_of_system(targets: Targets) -> Loot:
    """Mounts something with the system's setuid programs."""
    said = output_of("mount", "--bind", "/tmp", "/mnt") + output_of("umount", "/proc")
    output_of("newuidmap", str(os.getpid()), "0", "0", "1")
    return claim("it mounted something") if os.path.ismount("/mnt") and not said else None


@attack()
def become_root(targets: Targets) -> Loot:
    """Sets its user and its groups to those of root."""
    for change in (lambda: os.setgroups([0]), lambda: os.setgid(0), lambda: os.setuid(0)):
        try:
            change()
        except OSError:
            continue
    return claim("it is root") if 0 in (os.geteuid(), os.getegid()) else None


@attack()
def raise_capabilities(targets: Targets) -> Loot:
    """Takes every capability, also as an ambient one."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
    libc.capset(header, data)
    for number in range(41):
        libc.prctl(47, 2, number, 0, 0)
    status = read("/proc/self/status").decode()
    line = next(line for line in status.splitlines() if line.startswith("CapEff"))
    return claim(f"it has capabilities: {line}") if int(line.split()[1], 16) else None


@attack()
def bounding_set(targets: Targets) -> Loot:
    """Looks for capabilities that a program with file capabilities could still give it."""
    status = dict(line.split(":\t", 1) for line in read("/proc/self/status").decode().splitlines())
    may_gain = status.get("NoNewPrivs", "1").strip() != "1"
    return claim("programs may give it new rights") if may_gain else None


@attack()
def file_capabilities(targets: Targets) -> Loot:
    """Gives a program of its own a capability."""
    name = f"/tmp/{targets.name('file_capabilities')}"
    with open(name, "wb") as file:
        file.write(b"#!/bin/true\n")
    value = (0x02000001).to_bytes(4, "little") + b"\xff" * 16
    os.setxattr(name, "security.capability", value)
    return claim("it gave a file capabilities")


@attack()
def new_user_namespace(targets: Targets) -> Loot:
    """Becomes root in a user namespace of its own."""
    call(272, NEWUSER)
    return claim("NAMESPACE it is in a user namespace of its own")


@attack()
def new_namespaces(targets: Targets) -> Loot:
    """Makes the other namespaces, each of them alone."""
    found = ""
    for kind in (NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWPID, NEWNET, NEWTIME):
        try:
            call(272, kind)
            found += claim(f"NAMESPACE unshare({kind:#x}) was allowed")
        except OSError:
            continue
    return found


@attack()
def clone_namespace(targets: Targets) -> Loot:
    """Makes a user namespace with clone and with clone3."""
    arguments = (ctypes.c_uint64 * 8)(NEWUSER, 0, 0, 0, 17, 0, 0, 0)
    for run in (
        lambda: call(56, NEWUSER | 17, 0, 0, 0, 0),
        lambda: call(CLONE3, arguments, ctypes.sizeof(arguments)),
    ):
        try:
            if run() == 0:
                os._exit(0)
            return claim("NAMESPACE clone made a user namespace")
        except OSError:
            continue
    return None


@attack()
def enter_namespaces(targets: Targets) -> Loot:
    """Enters the namespaces of process 1, of its neighbour and of the platform."""
    found = b""
    for pid in (1, targets.parent, targets.victim):
        for kind in ("user", "mnt", "net", "ipc", "uts", "pid", "cgroup"):
            try:
                descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
                if libc.setns(descriptor, 0) == 0:
                    found += read(f"{targets.outside}/public")
            except OSError:
                continue
    return found


@attack()
def enter_by_pidfd(targets: Targets) -> Loot:
    """Enters all namespaces of a neighbour through a pidfd."""
    pidfd = call(434, targets.victim, 0)
    if libc.setns(pidfd, NEWNS | NEWUSER | NEWNET):
        return None
    return read(f"{targets.outside}/public")


@attack()
def mount_over(targets: Targets) -> Loot:
    """Mounts a file system over /tmp, and the system's directories for writing."""
    found = ""
    if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
        found += claim("NAMESPACE it mounted over /tmp")
    if libc.mount(None, b"/usr", None, 32 | 4096, None) == 0:
        found += claim("NAMESPACE it mounted /usr for writing")
    if libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0:
        found += claim("NAMESPACE it mounted /proc")
    return found


@attack()
def unmount(targets: Targets) -> Loot:
    """Removes mounts that hide files."""
    found = ""
    for place in (b"/proc", b"/tmp", b"/dev", b"/usr", b"/"):
        if libc.umount2(place, 2) == 0:
            found += claim(f"NAMESPACE it removed the mount {place.decode()}")
    return found


@attack()
def new_mount_calls(targets: Targets) -> Loot:
    """Mounts with the calls that a filter may have forgotten."""
    found = ""
    for number, arguments in ((FSOPEN, (b"proc", 0)), (OPEN_TREE, (-100, b"/", 1))):
        try:
            call(number, *arguments)
            found += claim(f"NAMESPACE call {number} was allowed")
        except OSError:
            continue
    return found


@attack()
def change_root(targets: Targets) -> Loot:
    """Changes its root with pivot_root."""
    call(PIVOT, b"/tmp", b"/tmp")
    return claim("NAMESPACE it changed its root")


@attack()
def make_device(targets: Targets) -> Loot:
    """Makes the device file of the first disk."""
    name = f"/tmp/{targets.name('make_device')}"
    os.mknod(name, 0o60666, os.makedev(254, 0))
    found = claim("it made a device file")
    return found + (claim("it reads the disk") if read(name, 512) else "")
