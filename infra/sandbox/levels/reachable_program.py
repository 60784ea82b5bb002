"""Copies a program to a directory where the user of user code can reach it.

Root's environments are often below /root, which is private. The user that starts a sandbox then cannot
execute a program that a package brought along.
"""

import os
import shutil
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

PLACES = (Path("/var/lib/headrace/programs"), Path(tempfile.gettempdir()))
"""Where copies are kept. Systems empty the second one now and then, so it is used only if the first
cannot be."""


def reachable_copy(root: Path, files: Sequence[str], *, name: str) -> Path:
    """Return a directory with `files` (paths below `root`) where every user can execute them: `root` if
    that is so already, or else a copy. The copy is made once, and used again as long as it is ours
    alone. Raises OSError when no directory can hold it."""
    root = root.resolve()
    sources = [root / file for file in files]
    places = {place for source in sources for place in (source, *source.parents)}
    if os.geteuid() != 0 or all(p.stat().st_mode & 0o001 for p in places):
        return root
    stats = [(str(s), s.stat().st_size, s.stat().st_mtime_ns) for s in sources]
    copy = _writable_place() / f"headrace-{name}-{sha256(repr(stats).encode()).hexdigest()[:16]}"
    if _is_ours(copy, files):
        return copy
    made = Path(tempfile.mkdtemp(prefix=f"headrace-{name}-", dir=copy.parent))
    for file in files:
        (made / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, made / file)
    for path in (made, *made.rglob("*")):
        path.chmod(0o755)
    try:
        made.rename(copy)
    except OSError:  # another process made it, or it is not ours
        if not _is_ours(copy, files):
            return made
        shutil.rmtree(made)
    return copy


def _writable_place() -> Path:
    for place in PLACES[:-1]:
        try:
            place.mkdir(mode=0o755, parents=True, exist_ok=True)
            flags = os.statvfs(place).f_flag
        except OSError:
            continue
        passable = all(above.stat().st_mode & 0o001 for above in (place, *place.parents))
        if passable and not flags & (os.ST_NOEXEC | os.ST_RDONLY):
            return place
    return PLACES[-1]


def _is_ours(copy: Path, files: Sequence[str]) -> bool:
    """Whether only we can have made this directory and the files in it."""
    paths = {copy}
    for file in files:
        path = copy / file
        paths |= {path, *path.parents} - set(copy.parents)
    try:
        stats = [path.lstat() for path in paths]
    except OSError:
        return False
    return all(stat.st_uid == os.geteuid() and not stat.st_mode & 0o022 for stat in stats)
