"""A database's directory outside of the directory that it belongs to.

A server of Postgres refuses to run as root, and the unprivileged user that runs it then may not reach a
private home. So as root its directory lies below /var/lib/headrace, and a link in the home leads there.
Whoever removes the home has lost the link, so what is made anew at the same place gets a directory of
its own; a home that was moved finds what it had.
"""

import shutil
from pathlib import Path
from uuid import uuid4

from schemas.errors import InvalidConfig

SYSTEM_ROOT = Path("/var/lib/headrace")


def found(link: Path) -> Path | None:
    """The directory that `link` leads to; None when there is no link. Raises InvalidConfig when the link
    is a copy: two owners of one directory would each ruin what the other wrote."""
    if not link.is_symlink():
        return None
    directory = link.readlink()
    owner = _owner(directory) or link.absolute()
    if owner != link.absolute() and owner.is_symlink() and owner.readlink() == directory:
        raise InvalidConfig(
            f"{link.parent} is a copy of {owner.parent}, whose database it would share; make a copy "
            "by `headrace backup` and `headrace restore`"
        )
    return directory


def made(link: Path) -> Path:
    """The directory that `link` leads to, both made now if there is no link. Raises InvalidConfig when
    the link is a copy."""
    directory = found(link)
    if directory is None:
        directory = SYSTEM_ROOT / uuid4().hex[:16]
        link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        link.symlink_to(directory)
    SYSTEM_ROOT.mkdir(parents=True, exist_ok=True, mode=0o755)
    directory.mkdir(exist_ok=True, mode=0o700)
    _note(directory).write_text(f"{link.absolute()}\n")
    return directory


def remove(link: Path) -> None:
    """Remove the directory that `link` leads to, and the link. Raises InvalidConfig when the link is a
    copy."""
    directory = found(link)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
        _note(directory).unlink(missing_ok=True)
        link.unlink()


def _owner(directory: Path) -> Path | None:
    """The link that the directory was made for."""
    try:
        return Path(_note(directory).read_text().strip())
    except FileNotFoundError:
        return None


def _note(directory: Path) -> Path:
    """The file that says so: beside the directory, for what is inside is the server's user's."""
    return directory.with_name(f"{directory.name}.owner")
