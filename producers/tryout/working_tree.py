"""The snapshot of a workspace as its files are now, with changes that are not committed."""

import io
import os
import subprocess
import tarfile
from pathlib import Path

from schemas.errors import Refused

MOST_FILES = 10_000
MOST_BYTES = 200 << 20
NEVER = frozenset({".git", ".venv", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache"})


def snapshot_of(workspace: Path) -> bytes:
    """Return the tree of a workspace as a deterministic tar: in a git repository, the files that git
    tracks or would add, and elsewhere all files. Links are left out. Raises Refused when it is too
    large."""
    out, num_bytes = io.BytesIO(), 0
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number, path in enumerate(sorted(_files(workspace))):
            file = workspace / path
            if file.is_symlink() or not file.is_file():
                continue
            member = tarfile.TarInfo(path)
            member.size = file.stat().st_size
            member.mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
            num_bytes += member.size
            if num_bytes > MOST_BYTES or number >= MOST_FILES:
                raise Refused(
                    f"{workspace} holds more than {MOST_FILES} files or {MOST_BYTES >> 20} MiB; keep "
                    "data and weights out of the workspace, or name them in .gitignore"
                )
            with file.open("rb") as source:
                tar.addfile(member, source)
    return out.getvalue()


def _files(workspace: Path) -> list[str]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(listing, cwd=workspace, capture_output=True, check=False)
    except OSError:
        listed = None
    if listed is not None and listed.returncode == 0:
        return [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    found = (path.relative_to(workspace) for path in workspace.rglob("*"))
    return [str(path) for path in found if not NEVER & set(path.parts)]
