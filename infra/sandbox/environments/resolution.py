"""Chooses the exact versions of a rollout's packages: by uv from the index, or from `uv.lock`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from infra.ports.packages import LONGEST_LOCK, DeclaredPackages
from infra.sandbox.written_trees import read_file
from schemas.errors import InvalidConfig, Refused
from schemas.toml.untrusted import parse_bounded_toml

PIN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*==[^\s;\\]+", re.MULTILINE)
LINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[^\s;@\\]+( ?;[^@]*)?")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
ROOT_SOURCES = ("virtual", "editable")


def index_options(index: str | None) -> tuple[str, ...]:
    """The options of uv for an index."""
    return ("--default-index", index) if index else ()


def write_inputs(declared: DeclaredPackages, folder: Path) -> tuple[str, ...]:
    """Write what uv reads into a working directory. Returns the arguments of uv, but for those that are
    the same for all. uv leaves the pins in `pins.txt`. Raises Refused for a lock that does not fit."""
    if declared.lock is not None:
        return _write_lock(declared, declared.lock, folder)
    (folder / "requirements.in").write_text(_lines(declared.dependencies))
    (folder / "overrides.txt").write_text(_lines(declared.overrides))
    (folder / "constraints.txt").write_text(_lines(declared.constraints))
    prerelease = ("--prerelease", declared.prerelease) if declared.prerelease else ()
    return (
        *("pip", "compile", "requirements.in", "--quiet", "--generate-hashes", "--no-header"),
        *("--no-annotate", "--only-binary", ":all:", "--output-file", "pins.txt"),
        *("--override", "overrides.txt", "--constraint", "constraints.txt", *prerelease),
    )


def read_pins(folder: Path, path: str) -> str:
    """Return the pins that uv left. Raises Refused when they hold anything but versions and hashes."""
    try:
        pins = (read_file(folder, "pins.txt", most=LONGEST_LOCK) or b"").decode()
    except (Refused, ValueError) as error:
        raise Refused(
            f"{path} leads to more than {LONGEST_LOCK >> 20} MiB of pins, or to none ({error}); use "
            "fewer packages"
        ) from error
    check_pins(pins, path)
    return pins


def check_pins(pins: str, path: str) -> None:
    """Raise Refused unless pins hold exact versions with hashes, and nothing else."""
    for line in _logical_lines(pins):
        words = line.split(" --hash=")
        hashes = [f"--hash={word.strip()}" for word in words[1:]]
        if LINE.fullmatch(words[0].strip()) is None or not hashes:
            raise Refused(
                f"{path} leads to {line[:80]!r}, which is not a released version with a hash; name "
                "released versions only"
            )
        if not all(HASH.fullmatch(one) for one in hashes):
            raise Refused(
                f"{path} leads to a hash that is not sha256: {line[:80]!r}; lock it again"
            )


def count_pins(pins: str) -> int:
    """Return the number of packages."""
    return len(PIN.findall(pins))


def _logical_lines(text: str) -> Iterator[str]:
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield re.sub(r"\s+", " ", line.strip())


def _lines(requirements: tuple[str, ...]) -> str:
    return "".join(f"{line}\n" for line in requirements)


def _write_lock(declared: DeclaredPackages, text: str, folder: Path) -> tuple[str, ...]:
    name = _check_lock(declared, text)
    # Only names and versions of the author's file: no build backend, no sources, no scripts.
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "0"\n'
        f"requires-python = {_quote(declared.requires_python or '>=3.11')}\n"
        f"dependencies = [{', '.join(map(_quote, declared.dependencies))}]\n"
        "[tool.uv]\npackage = false\n"
    )
    (folder / "uv.lock").write_text(text)
    return (
        *("export", "--quiet", "--frozen", "--no-dev", "--no-emit-project", "--no-header"),
        *("--no-annotate", "--format", "requirements-txt", "--output-file", "pins.txt"),
    )


def _check_lock(declared: DeclaredPackages, text: str) -> str:
    """Return the name of the project in a lock. Raises Refused when the lock cannot be read, is stale,
    or holds packages that are not of an index."""
    path = f"{Path(declared.path).parent}/uv.lock"
    try:
        found = parse_bounded_toml(text.encode(), "it", most_bytes=LONGEST_LOCK)
        packages = found.get("package", [])
        root, *others = sorted(packages, key=lambda package: not _is_root(package))
        if not _is_root(root):
            raise ValueError("it has no project")
        locked = _read_locked(root)
        name = canonicalize_name(str(root["name"]), validate=True)
        sources = [(str(package["name"]), package.get("source", {})) for package in others]
    except (InvalidConfig, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path} cannot be read: {str(error)[:200]}; run `uv lock` again") from error
    for package, source in sources:
        if "registry" not in source:
            kind = next(iter(source), "no source")
            raise Refused(
                f"{path} has {package[:80]} from another place ({kind[:40]}), and packages are "
                "installed from the index only; name a released version"
            )
    wanted = {_normal(line) for line in declared.dependencies}
    if missing := sorted(wanted - locked) + sorted(locked - wanted):
        raise Refused(
            f"{path} is older than {declared.path}: they differ in {missing[0][:80]!r}; run `uv lock` "
            "and commit it"
        )
    return str(name)


def _is_root(package: Mapping[str, Any]) -> bool:
    source = package.get("source", {})
    return any(source.get(kind) == "." for kind in ROOT_SOURCES)


def _read_locked(root: Mapping[str, Any]) -> set[str]:
    """The requirements of the project when it was locked."""
    found = set()
    for one in root.get("metadata", {}).get("requires-dist", []):
        if "extra ==" in one.get("marker", ""):
            continue
        extras = f"[{','.join(one['extras'])}]" if one.get("extras") else ""
        marker = f"; {one['marker']}" if one.get("marker") else ""
        found.add(_normal(f"{one['name']}{extras}{one.get('specifier', '')}{marker}"))
    return {line for line in found if not line.startswith("headrace")}


def _normal(line: str) -> str:
    try:
        requirement = Requirement(line)
    except InvalidRequirement as error:
        raise ValueError(str(error)) from error
    requirement.name = canonicalize_name(requirement.name)
    return str(requirement)


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
