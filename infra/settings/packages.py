"""Where packages of rollouts come from, and how much of them is kept: `HEADRACE_PACKAGE_INDEX`,
`HEADRACE_PACKAGE_HOSTS`, `HEADRACE_PYTHONS`, `HEADRACE_ENVIRONMENTS` and
`HEADRACE_ENVIRONMENTS_MB`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from infra.settings.git import HOST

INDEX = "HEADRACE_PACKAGE_INDEX"
HOSTS = "HEADRACE_PACKAGE_HOSTS"
PYTHONS = "HEADRACE_PYTHONS"
DIRECTORY = "HEADRACE_ENVIRONMENTS"
KEPT = "HEADRACE_ENVIRONMENTS_MB"
KEPT_MB, LARGEST_MB = 20_480, 5_120
BELOW_HOME = "packages"
VARIABLES = (INDEX, HOSTS, PYTHONS, DIRECTORY, KEPT)
SYSTEM_DIRECTORY = Path("/var/lib/headrace/environments")


@dataclass(frozen=True, slots=True)
class PackageSettings:
    """The index of packages (None for the one of uv), other hosts of its files, further interpreters,
    the directory of all environments, and the most bytes of all of them and of one."""

    directory: Path
    index: str | None = None
    hosts: frozenset[str] = frozenset()
    pythons: tuple[Path, ...] = ()
    kept_bytes: int = KEPT_MB << 20
    largest_bytes: int = LARGEST_MB << 20

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> "PackageSettings":
        """Read the environment. Raises ValueError with the line to print."""
        return cls(
            directory=_directory(environ),
            index=_index(environ.get(INDEX) or ""),
            hosts=_hosts(environ.get(HOSTS) or ""),
            pythons=tuple(Path(part) for part in (environ.get(PYTHONS) or "").split(":") if part),
            kept_bytes=_megabytes(environ.get(KEPT) or str(KEPT_MB)) << 20,
        )


def _directory(environ: Mapping[str, str]) -> Path:
    """The directory of environments. For root it lies where the user of user code can read it."""
    if value := environ.get(DIRECTORY):
        path = Path(value)
        if not path.is_absolute():
            raise ValueError(f"{DIRECTORY} holds {value!r}; it may hold an absolute path")
        return path
    if os.geteuid() == 0:
        return SYSTEM_DIRECTORY
    if home := environ.get("HEADRACE_HOME"):
        return Path(home).expanduser().absolute() / BELOW_HOME
    try:
        return Path("~/.headrace").expanduser() / BELOW_HOME
    except RuntimeError as error:
        raise ValueError(
            f"{DIRECTORY} is not set, and this user has no home directory; set it to an absolute path"
        ) from error


def _index(value: str) -> str | None:
    if not value:
        return None
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ValueError(
            f"{INDEX} does not hold the address of an index; it may hold "
            "https://packages.example/index, without a user name or password"
        )
    return value


def _hosts(value: str) -> frozenset[str]:
    names = frozenset(name.strip().lower() for name in value.split(",") if name.strip())
    for name in names:
        if not HOST.fullmatch(name):
            raise ValueError(
                f"{HOSTS} holds {name[:80]!r}; it may hold names of hosts with commas between them"
            )
    return names


def _megabytes(value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 100 <= int(value[:9]) <= 10_000_000:
        raise ValueError(
            f"{KEPT} holds {value[:40]!r}; it may hold a whole number from 100 to 10000000"
        )
    return int(value)
