"""Files outside: written, filled or read. The harness looks for their names."""

import os
import shutil

from tests.escapes.attacks.attack import Loot, Targets, attack, claim, read, write


def _places(targets: Targets) -> tuple[str, ...]:
    return (
        targets.temporary,
        "/tmp",
        "/var/tmp",
        "/dev/shm",
        targets.outside,
        targets.home,
        "/run",
    )


@attack()
def write_everywhere(targets: Targets) -> Loot:
    """Leaves a file in every directory that others use."""
    for place in (*_places(targets), "/etc", "/usr/lib", "/var/lib", "/opt", "/srv", "/", "/home"):
        write(f"{place}/{targets.name('write_everywhere')}", "left")
    return None


@attack()
def fill_temporary(targets: Targets) -> Loot:
    """Writes 64 MiB into each directory for temporary files."""
    for place in ("/var/tmp", targets.temporary):
        name = f"{place}/{targets.name('fill_temporary')}"
        for _ in range(4):
            write(name, "x" * (16 << 20), flags=os.O_CREAT | os.O_APPEND)
    return None


@attack()
def fill_shared_memory(targets: Targets) -> Loot:
    """Writes 32 MiB into /dev/shm."""
    write(f"/dev/shm/{targets.name('fill_shared_memory')}", "x" * (32 << 20))
    return None


@attack()
def sparse_file(targets: Targets) -> Loot:
    """Makes a file of 8 TiB that holds nothing."""
    for place in _places(targets):
        try:
            with open(f"{place}/{targets.name('sparse_file')}", "wb") as file:
                file.truncate(8 << 40)
            return claim(f"a file of 8 TiB is allowed in {place}")
        except OSError:
            continue
    return None


@attack()
def many_inodes(targets: Targets) -> Loot:
    """Makes 2,000 empty files in a directory for temporary files."""
    for place in (targets.temporary, "/tmp"):
        folder = f"{place}/{targets.name('many_inodes')}"
        try:
            os.mkdir(folder)
        except OSError:
            continue
        for number in range(1000):
            write(f"{folder}/{number}", "")
    return None


@attack()
def size_of_temporary(targets: Targets) -> Loot:
    """Looks whether its temporary files have no limit of their own."""
    stat = os.statvfs("/tmp")
    size = stat.f_blocks * stat.f_frsize
    return claim(f"/tmp holds {size >> 20} MiB") if size > 4 << 30 else None


@attack()
def huge_file(targets: Targets) -> Loot:
    """Reserves more than the largest file that is allowed."""
    name = f"/tmp/{targets.name('huge_file')}"
    descriptor = os.open(name, os.O_CREAT | os.O_WRONLY)
    try:
        os.ftruncate(descriptor, 3 << 30)
        return claim("a file of 3 GiB is allowed")
    finally:
        os.unlink(name)


@attack()
def read_secret_files(targets: Targets) -> Loot:
    """Reads the files of the platform: its token, its blobs and what lies beside them."""
    found = b""
    for top in (targets.home, targets.outside):
        for folder, _, names in os.walk(top):
            found += b"".join(read(f"{folder}/{name}") for name in names)
    return found


@attack()
def overwrite_files(targets: Targets) -> Loot:
    """Overwrites and removes the files of the platform."""
    for top in (targets.home, targets.outside):
        for folder, _, names in os.walk(top):
            for name in names:
                write(f"{folder}/{name}", "overwritten")
        shutil.rmtree(f"{top}/removable", ignore_errors=True)
    return None


@attack()
def code_of_others(targets: Targets) -> Loot:
    """Reads the code of another rollout."""
    found = b""
    for folder, _, names in os.walk(targets.neighbour_tree):
        found += b"".join(read(f"{folder}/{name}") for name in names)
    for name in os.listdir("/tmp"):
        if name.startswith("headrace-code-"):
            found += targets.marks(" ".join(os.listdir(f"/tmp/{name}"))).encode()
    return found


@attack()
def climb_out(targets: Targets) -> Loot:
    """Climbs from its own directory to the root and down to a secret."""
    up = "../" * 40
    found = b""
    for name in (f"{targets.outside}/public", f"{targets.home}/token"):
        found += read(f"/proc/self/cwd/{up}{name}") + read(f"/proc/self/root/{up}{name}")
    return found


@attack()
def break_chroot(targets: Targets) -> Loot:
    """Leaves its root by chroot into a directory while it holds one outside of it."""
    folder = f"/tmp/{targets.name('break_chroot')}"
    os.makedirs(folder, exist_ok=True)
    held = os.open("/", os.O_RDONLY)
    os.chroot(folder)
    os.fchdir(held)
    for _ in range(64):
        os.chdir("..")
    os.chroot(".")
    return read(f"{targets.outside}/public")
