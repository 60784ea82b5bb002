"""Files of the kernel in /proc and /sys. A write that works changes little, and the harness sees it."""

import os

from tests.escapes.attacks.attack import Loot, Targets, attack, claim, libc, read, write

QUEUED_EVENTS = "/proc/sys/fs/inotify/max_queued_events"


@attack()
def system_request(targets: Targets) -> Loot:
    """Asks the kernel for its list of system requests."""
    return (
        claim("sysrq-trigger was written") if write("/proc/sysrq-trigger", "h", flags=0) else None
    )


@attack()
def core_pattern(targets: Targets) -> Loot:
    """Names the program that the kernel starts, as root, when a process crashes. It writes the name that
    is there already."""
    name = read("/proc/sys/kernel/core_pattern").decode().strip()
    done = write("/proc/sys/kernel/core_pattern", name, flags=0)
    return claim("core_pattern was written") if done else None


@attack()
def other_helpers(targets: Targets) -> Loot:
    """Opens for writing the names of the other programs that the kernel starts as root."""
    found = ""
    for name in ("modprobe", "hotplug", "poweroff_cmd", "usermodehelper/bset"):
        try:
            os.close(os.open(f"/proc/sys/kernel/{name}", os.O_WRONLY))
            found += claim(f"kernel/{name} may be written")
        except OSError:
            continue
    return found


@attack()
def kernel_setting(targets: Targets) -> Loot:
    """Raises a harmless setting of the kernel by one."""
    value = int(read(QUEUED_EVENTS) or b"0")
    write(QUEUED_EVENTS, str(value + 1), flags=0)
    return None


@attack()
def kernel_settings(targets: Targets) -> Loot:
    """Opens all settings of the kernel for writing."""
    found = []
    for folder, _, names in os.walk("/proc/sys"):
        for name in set(names) - {"ns_last_pid"}:  # it may be opened, and a write is refused
            try:
                os.close(os.open(f"{folder}/{name}", os.O_WRONLY))
                found.append(f"{folder}/{name}")
            except OSError:
                continue
    return claim(f"{len(found)} settings may be written: {found[:3]}") if found else None


@attack()
def kernel_memory(targets: Targets) -> Loot:
    """Reads the kernel's memory."""
    found = b"".join(read(n, 64) for n in ("/proc/kcore", "/dev/mem", "/dev/kmem", "/dev/port"))
    return claim("it read the kernel's memory") if found else None


@attack()
def kernel_log(targets: Targets) -> Loot:
    """Reads the kernel's log and writes into it."""
    write("/dev/kmsg", targets.name("kernel_log"), flags=0)
    write("/proc/kmsg", targets.name("kernel_log"), flags=0)
    buffer = bytearray(4096)
    import ctypes

    target = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    size = libc.klogctl(3, target, len(buffer))
    return claim("SYSCALL it read the kernel's log") if size > 0 else None


@attack()
def addresses_of_kernel(targets: Targets) -> Loot:
    """Reads the addresses of the kernel's functions."""
    lines = read("/proc/kallsyms").splitlines()
    shown = [line for line in lines if not line.startswith(b"0000000000000000")]
    return claim("it reads the kernel's addresses") if shown else None


@attack()
def root_of_first(targets: Targets) -> Loot:
    """Reads a file through the root of process 1."""
    return read(f"/proc/1/root{targets.outside}/public") + read(f"/proc/1/root{targets.home}/token")


@attack()
def own_priority(targets: Targets) -> Loot:
    """Protects itself from the kernel when memory is short."""
    done = write("/proc/self/oom_score_adj", "-1000", flags=0)
    return claim("it is never killed when memory is short") if done else None


@attack()
def control_groups(targets: Targets) -> Loot:
    """Makes a control group, and leaves its own for the root of them."""
    found = ""
    for place in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids"):
        try:
            os.mkdir(f"{place}/{targets.name('control_groups')}")
            found += claim(f"it made a control group in {place}")
        except OSError:
            pass
        if write(f"{place}/cgroup.procs", str(os.getpid()), flags=0):
            found += claim(f"it moved itself into {place}")
    return found


@attack()
def release_agent(targets: Targets) -> Loot:
    """Names a program that the kernel starts, as root, when a control group is empty."""
    found = ""
    for folder, folders, names in os.walk("/sys/fs/cgroup"):
        del folders[8:]
        if "release_agent" in names and os.access(f"{folder}/release_agent", os.W_OK):
            found += claim(f"{folder}/release_agent may be written")
    return found


@attack()
def system_files(targets: Targets) -> Loot:
    """Opens files in /sys for writing that change the machine."""
    found = ""
    for name in (
        "kernel/mm/transparent_hugepage/enabled",
        "kernel/uevent_helper",
        "power/state",
        "kernel/vmcoreinfo",
        "module/printk/parameters/time",
        "firmware/efi/vars",
    ):
        try:
            os.close(os.open(f"/sys/{name}", os.O_WRONLY))
            found += claim(f"/sys/{name} may be written")
        except OSError:
            continue
    return found


@attack()
def mounts_of_others(targets: Targets) -> Loot:
    """Learns from the mounts of other processes where the platform keeps its files."""
    near = (1, targets.parent, targets.victim)
    found = b"".join(read(f"/proc/{pid}/mountinfo", 1 << 20) for pid in near)
    return targets.marks(found)
