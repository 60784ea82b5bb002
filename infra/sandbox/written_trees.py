"""Trees that a confined process could write, as the platform handles them once it has ended.

Such a tree may hold anything: links that lead elsewhere, pipes that block the one that opens them, and
directories without permissions or ten thousand levels deep. Nothing in it is opened by its path. Each
entry is reached from a handle of its directory, no link is followed, and only directories and regular
files are opened. The tree's own parent belongs to the platform.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import Refused

MOST_DEPTH = 64
"""How many directories lie inside each other in a tree that is measured or sealed. Each is held open."""

MOST_ENTRIES = 2_000_000
"""How many entries a tree has that is looked at. A process that still writes could add them without an
end."""

COPIED_AT_ONCE = 1 << 20

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PIN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
"""How an entry is held without being opened: neither a pipe nor a device notices."""

CONTENT = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """An entry of a tree: the handle of its directory, its name in there, its place below the tree's top
    (with slashes), and what the file system says of it, with links not followed."""

    parent: int
    name: str
    place: str
    told: os.stat_result


@contextlib.contextmanager
def open_tree(folder: Path) -> Iterator[int]:
    """The handle of a directory, until the block ends. Raises OSError, also when it is a link."""
    handle = os.open(folder, DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def walk_tree(top: int) -> Iterator[TreeEntry]:
    """Yield all entries below the directory with the handle `top`, each directory before what it holds.
    What disappears meanwhile is left out. Raises Refused for a directory that cannot be read and for one
    deeper than MOST_DEPTH, because both would hide what they hold, and after MOST_ENTRIES entries."""
    count = 0
    levels = [(os.open(".", DIRECTORY, dir_fd=top), "")]
    pending = [_entries(levels[-1][0])]
    try:
        while pending:
            handle, above = levels[-1]
            entry = next(pending[-1], None)
            if entry is None:
                pending.pop()
                levels.pop()
                os.close(handle)
                continue
            place = f"{above}{entry[0]}"
            count += 1
            if count > MOST_ENTRIES:
                raise Refused(f"it holds more than {MOST_ENTRIES} files and directories")
            yield TreeEntry(handle, entry[0], place, entry[1])
            if stat.S_ISDIR(entry[1].st_mode):
                if len(levels) >= MOST_DEPTH:
                    raise Refused(f"{place[:80]!r} is deeper than {MOST_DEPTH} directories")
                if (inner := _open_inner(handle, entry[0], place)) is not None:
                    levels.append((inner, f"{place}/"))
                    pending.append(_entries(inner))
    finally:
        for handle, _ in levels:
            os.close(handle)


def measure_tree(folder: Path) -> tuple[int, int]:
    """Return the bytes of the files below a directory, and the number of files and directories, both 0
    without it. A file with two names counts once. Raises Refused as `walk_tree`."""
    size, seen = 0, set()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open_tree(folder) as top:
        for entry in walk_tree(top):
            if entry.told.st_ino not in seen:
                seen.add(entry.told.st_ino)
                size += 0 if stat.S_ISDIR(entry.told.st_mode) else entry.told.st_size
    return size, len(seen)


def seal_tree(top: int, owners: Container[int]) -> None:
    """Make a tree of these users ours and read-only, from its top down, so that nobody else changes what
    was already looked at. Where user code has our own user, SEAL has made it read-only, and that is only
    checked. Raises Refused for anything but links, directories and files of these users on one file
    system, and for a file that has another name, which may lie elsewhere."""
    first = os.fstat(top)
    _check(first, first, "the directory", owners)
    _seal(top, first, "the directory")
    for entry in walk_tree(top):
        pin = os.open(entry.name, PIN, dir_fd=entry.parent)
        try:
            told = os.fstat(pin)
            if told.st_ino != entry.told.st_ino:
                raise Refused(f"{entry.place[:80]!r} was exchanged while it was looked at")
            _check(told, first, entry.place, owners)
            _seal(pin, told, entry.place)
        finally:
            os.close(pin)


SEAL = """
import os, stat, sys
for _, _, names, folder in os.fwalk(sys.argv[1]):
    os.fchmod(folder, 0o755)
    for name in names:
        mode = os.lstat(name, dir_fd=folder).st_mode
        if stat.S_ISREG(mode):
            os.chmod(name, 0o555 if mode & stat.S_IXUSR else 0o444, dir_fd=folder)
"""
"""The program by which a confined process makes a directory read-only, where it has our own user."""


def move_tree(source: Path, target: Path, *, top: int) -> None:
    """Rename a directory whose handle is `top`. Raises Refused when another one has taken its place."""
    source.rename(target)
    if not os.path.samestat(os.fstat(top), target.lstat()):
        remove_tree(target)
        raise Refused(f"{source.name} was exchanged while it was looked at")


def remove_tree(folder: Path) -> None:
    """Remove a tree, or a single file or link, whatever it holds and however deep it is. What cannot be
    removed stays, without an error."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(folder.lstat().st_mode):
            folder.unlink()
            return
        _allow(folder)
        with open_tree(folder) as top:
            _empty(top)
        folder.rmdir()


def read_file(folder: Path, name: str, *, most: int) -> bytes | None:
    """Return a regular file of a directory, or None when there is no such file. Raises Refused for
    anything else of that name, and for one with more than `most` bytes."""
    try:
        with open_tree(folder) as top:
            handle = os.open(name, CONTENT, dir_fd=top)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused(f"{name} is not a file that can be read: {error.strerror}") from error
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Refused(f"{name} is not a file")
        data = file.read(most + 1)
    if len(data) > most:
        raise Refused(f"{name} has more than {most} bytes")
    return data


def list_files(folder: Path) -> dict[str, int]:
    """Return the regular files below a directory: the place of each, and its bytes. Raises Refused as
    `walk_tree`."""
    with open_tree(folder) as top:
        return {
            entry.place: entry.told.st_size
            for entry in walk_tree(top)
            if stat.S_ISREG(entry.told.st_mode)
        }


def copy_files(folder: Path, targets: Mapping[str, Path]) -> None:
    """Copy regular files below a directory to new files of ours, and make these durable. `targets` has
    the place of each. Raises Refused as `walk_tree`, and OSError when one cannot be copied."""
    with open_tree(folder) as top:
        for entry in walk_tree(top):
            target = targets.get(entry.place)
            if target is not None and stat.S_ISREG(entry.told.st_mode):
                handle = os.open(entry.name, CONTENT, dir_fd=entry.parent)
                with os.fdopen(handle, "rb") as source, target.open("xb") as copy:
                    shutil.copyfileobj(source, copy, COPIED_AT_ONCE)
                    copy.flush()
                    os.fsync(copy.fileno())


def has_directory(place: Path) -> bool:
    """Whether there is a directory at this place, and not a link to one."""
    return _kind_of(place) == stat.S_IFDIR


def has_file(place: Path) -> bool:
    """Whether there is a regular file at this place, and not a link to one."""
    return _kind_of(place) == stat.S_IFREG


def _kind_of(place: Path) -> int | None:
    try:
        return stat.S_IFMT(place.lstat().st_mode)
    except OSError:
        return None


def _entries(handle: int) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(handle) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):
                yield entry.name, entry.stat(follow_symlinks=False)


def _open_inner(handle: int, name: str, place: str) -> int | None:
    try:
        return os.open(name, DIRECTORY, dir_fd=handle)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Refused(f"{place[:80]!r} cannot be read: {error.strerror}") from error


def _check(told: os.stat_result, top: os.stat_result, place: str, owners: Container[int]) -> None:
    """Raise Refused for what only looks like a part of a tree of these users."""
    kind = stat.S_IFMT(told.st_mode)
    shown = repr(place[:80])
    if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
        raise Refused(f"{shown} is not a file")
    if told.st_uid not in owners or told.st_dev != top.st_dev:
        raise Refused(f"{shown} belongs to something else of this machine")
    if kind != stat.S_IFDIR and told.st_nlink != 1:
        raise Refused(f"{shown} has more than one name")


def _seal(handle: int, told: os.stat_result, place: str) -> None:
    """Make the file of a handle ours and read-only, or check that it is. A handle that only holds a file
    cannot change it, so the kernel's own name for the handle is used, which nobody can exchange."""
    is_folder, is_link = stat.S_ISDIR(told.st_mode), stat.S_ISLNK(told.st_mode)
    if os.geteuid() != 0:
        too_much = 0o7022 if is_folder else 0o7222
        if not is_link and told.st_mode & too_much:
            raise Refused(f"{place[:80]!r} can still be written")
        return
    own = f"/proc/self/fd/{handle}"
    os.chown(own, 0, 0)
    if not is_link:
        runs = bool(told.st_mode & stat.S_IXUSR)
        os.chmod(own, 0o755 if is_folder else 0o555 if runs else 0o444)  # noqa: PTH101 - a handle


def _allow(folder: Path, *, parent: int | None = None) -> None:
    """Give us all rights to a directory, which its writer may have taken away."""
    pin = os.open(folder, PIN | os.O_DIRECTORY, dir_fd=parent)
    try:
        if os.fstat(pin).st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(f"/proc/self/fd/{pin}", stat.S_IRWXU)  # noqa: PTH101 - a handle
    finally:
        os.close(pin)


def _empty(top: int) -> None:
    """Remove all that a directory holds. Directories inside are moved to its top and emptied there, so
    that their depth does not matter."""
    count = 0
    left = [name for name in os.listdir(top) if not _is_unlinked(top, name)]
    while left:
        folder = left.pop()
        _allow(Path(folder), parent=top)
        inner = os.open(folder, DIRECTORY, dir_fd=top)
        try:
            for name in os.listdir(inner):  # noqa: PTH208 - a handle
                if not _is_unlinked(inner, name):
                    _allow(Path(name), parent=inner)
                    while _exists(top, moved := f"{count:x}.removed"):
                        count += 1
                    os.rename(name, moved, src_dir_fd=inner, dst_dir_fd=top)
                    left.append(moved)
        finally:
            os.close(inner)
        os.rmdir(folder, dir_fd=top)


def _exists(handle: int, name: str) -> bool:
    try:
        os.lstat(name, dir_fd=handle)
    except FileNotFoundError:
        return False
    return True


def _is_unlinked(handle: int, name: str) -> bool:
    """Unlink an entry, unless it is gone. Returns False for a directory."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(name, dir_fd=handle).st_mode):
            return False
        os.unlink(name, dir_fd=handle)
    return True
