"""The database directory of a home that is owned by root. It lies outside of the home.

Postgres refuses to run as root, and the unprivileged user that runs it instead may not be able to enter
a private home. So for root the database lies below /var/lib/headrace, and a link in the home leads
there. Removing the home removes the link, so a new home at the same path gets a directory of its own. A
home that was moved keeps its database.
"""

import shutil
from pathlib import Path
from uuid import uuid4

from schemas.errors import InvalidConfig

SYSTEM_ROOT = Path("/var/lib/headrace")


def find_directory(link: Path) -> Path | None:
    """The directory that `link` leads to; None when there is no link. Raises InvalidConfig when the link
    is a copy of another home's link, because two homes that share one database would damage it."""
    if not link.is_symlink():
        return None
    directory = link.readlink()
    owner = _owner(directory) or link.absolute()
    if owner != link.absolute() and owner.is_symlink() and owner.readlink() == directory:
        raise InvalidConfig(
            f"{link.parent} is a copy of {owner.parent} and would share its database; copy it with "
            "`headrace backup` and `headrace restore`"
        )
    return directory


def ensure_directory(link: Path) -> Path:
    """Return the directory that `link` leads to. Creates both if there is no link. Raises InvalidConfig
    when the link was copied."""
    directory = find_directory(link)
    if directory is None:
        directory = SYSTEM_ROOT / uuid4().hex[:16]
        link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        link.symlink_to(directory)
    SYSTEM_ROOT.mkdir(parents=True, exist_ok=True, mode=0o755)
    directory.mkdir(exist_ok=True, mode=0o700)
    _note(directory).write_text(f"{link.absolute()}\n")
    return directory


def remove(link: Path) -> None:
    """Remove the directory that `link` leads to, and the link. Raises InvalidConfig when the link was
    copied."""
    directory = find_directory(link)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
        _note(directory).unlink(missing_ok=True)
        link.unlink()


def _owner(directory: Path) -> Path | None:
    """The link that the directory was created for."""
    try:
        return Path(_note(directory).read_text().strip())
    except FileNotFoundError:
        return None


def _note(directory: Path) -> Path:
    """The file that names the link. It lies outside of the directory, because the server's user owns the
    directory and could change the file."""
    return directory.with_name(f"{directory.name}.owner")
