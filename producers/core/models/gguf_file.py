"""The model in a GGUF file of the server's machine, before a worker loads it."""

from functools import lru_cache
from pathlib import Path

from schemas.errors import InvalidConfig, Refused
from schemas.models.gguf import ENDING
from schemas.models.gguf_model import GgufModel, read_model

CONFIG = "config.json"
LISTED = 5


def find_gguf(place: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one of a directory without a config.json;
    None when it means no such file. Raises InvalidConfig when a directory has several."""
    if place.is_file():
        return place if place.suffix == ENDING else None
    if not place.is_dir() or (place / CONFIG).is_file():
        return None
    found = sorted(path for path in place.glob(f"*{ENDING}") if path.is_file())
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:LISTED])
        raise InvalidConfig(
            f"{place} has {len(found)} GGUF files ({names}); give the path of one of them"
        )
    return found[0] if found else None


def read_gguf(path: Path) -> GgufModel:
    """The model in a GGUF file, from its header. Raises InvalidConfig when it cannot be used."""
    try:
        told = path.stat()
        return _read(path, told.st_size, told.st_mtime_ns)
    except OSError as error:
        raise InvalidConfig(
            f"{path} cannot be read ({error.strerror}); give the path of a file that the server can read"
        ) from error
    except Refused as error:
        raise InvalidConfig(error.message) from error


@lru_cache(maxsize=2)  # a form is checked while it is written
def _read(path: Path, size: int, _mtime_ns: int) -> GgufModel:
    with path.open("rb") as file:
        return read_model(file, size=size, what=str(path))
