"""Archives of artifacts: a folder becomes a tar.gz that depends on nothing but its files, and back."""

import gzip
import tarfile
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from producers.cli.errors import Failure

LEFT_OUT = frozenset({".git", "__pycache__", "dist", ".venv", "node_modules", ".DS_Store"})
"""Names of files and folders that are not packed."""


@contextmanager
def packed_archive(source: Path) -> Iterator[Path]:
    """The archive of a folder, in a temporary file; or `source` itself when it is a file. Raises
    Failure."""
    if source.is_file():
        yield source
        return
    if not source.is_dir():
        raise Failure("NOT_FOUND", f"{source} does not exist; name a folder or a .tar.gz")
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(directory) / f"{source.resolve().name}.tar.gz"
        pack_folder(source, archive)
        yield archive


def pack_folder(folder: Path, archive: Path) -> None:
    """Write the files of a folder into an archive. Equal files give equal bytes, because times and
    owners are left out. Raises Failure when the folder has a link, or no files."""
    count = 0
    with (
        archive.open("wb") as file,
        gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as packed,
    ):
        for path in _files(folder):
            info = tarfile.TarInfo(
                unicodedata.normalize("NFC", path.relative_to(folder).as_posix())
            )
            info.size = path.stat().st_size
            info.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            with path.open("rb") as content:
                packed.addfile(info, content)
            count += 1
    if count == 0:
        raise Failure("VALIDATION", f"the folder {folder} has no files; name another folder")


def unpack_archive(archive: Path, folder: Path) -> int:
    """Unpack an archive below a new folder, and return the number of its files. Raises Failure when
    something of it would lie elsewhere."""
    folder.mkdir(parents=True)
    try:
        with tarfile.open(archive, mode="r:gz") as packed:
            members = packed.getmembers()
            packed.extractall(folder, members, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise Failure(
            "BAD_ANSWER", f"the archive cannot be unpacked into {folder}: {error}"
        ) from error
    return sum(member.isfile() for member in members)


def read_manifest(archive: Path, name: str) -> str:
    """The text of a file at the top of an archive; empty when there is no such file."""
    try:
        with tarfile.open(archive, mode="r:gz") as packed:
            content = packed.extractfile(name)
            return "" if content is None else content.read(1 << 20).decode(errors="replace")
    except KeyError:
        return ""
    except (tarfile.TarError, OSError, EOFError) as error:
        raise Failure(
            "VALIDATION", f"{archive} is not a tar.gz ({error}); name a folder or an archive"
        ) from error


def _files(folder: Path) -> Iterator[Path]:
    """The files below a folder in the order of their paths."""
    for path in sorted(folder.iterdir(), key=lambda one: one.name):
        if path.name in LEFT_OUT:
            continue
        if path.is_symlink():
            raise Failure("VALIDATION", f"{path} is a link; put in the file itself")
        if path.is_dir():
            yield from _files(path)
        elif path.is_file():
            yield path
