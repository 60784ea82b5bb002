"""Reads what a rollout's `pyproject.toml` and `uv.lock` ask for. Both come from a hostile repository.

Only names and versions are taken from them. The package index is the operator's choice, and nothing of a
repository is built, so keys that name other sources are refused. A build backend is never run.
"""

import tarfile
from collections.abc import Mapping
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from infra.ports.packages import LONGEST_LOCK, MOST_REQUIREMENTS, DeclaredPackages
from schemas.errors import Refused
from schemas.toml.untrusted import MOST_BYTES, read_untrusted_toml

LONGEST = 500
PROVIDED = ("headrace", "python")
"""Dependencies that are always there."""

POETRY = ("tool", "poetry", "dependencies")
OF_UV = ("override-dependencies", "constraint-dependencies", "prerelease")
"""Keys of [tool.uv] that are used."""

IGNORED = ("package", "managed", "dev-dependencies", "default-groups", "required-version")
"""Keys of [tool.uv] that do not matter here. Others are refused, because they name other sources or
build packages."""

PRERELEASES = ("disallow", "allow", "if-necessary", "explicit", "if-necessary-or-explicit")


def read_declared(tree: tarfile.TarFile, rollout: str) -> DeclaredPackages | None:
    """Return the packages that a rollout of a snapshot asks for, or None if it needs none. Raises
    Refused, with the file and what to do, when they cannot be installed."""
    path = f"rollouts/{rollout}/pyproject.toml"
    text = _read(tree, path, MOST_BYTES)
    if text is None:
        return None
    document = read_untrusted_toml(text.encode(), path)
    lock = _read(tree, f"rollouts/{rollout}/uv.lock", LONGEST_LOCK)
    return declared_packages(document, path, lock)


def declared_packages(
    document: Mapping[str, Any], path: str, lock: str | None
) -> DeclaredPackages | None:
    """Return the packages that a parsed `pyproject.toml` asks for, or None if it needs none. Raises
    Refused."""
    project = _table(document, "project")
    dynamic = project.get("dynamic")
    if isinstance(dynamic, list) and "dependencies" in dynamic:
        raise Refused(
            f"{path} has dynamic dependencies, and build backends are not run; list them in "
            "project.dependencies"
        )
    if "dependencies" not in project and set(_table(document, *POETRY)) - {*PROVIDED}:
        raise Refused(
            f"{path} has tool.poetry.dependencies, which is not read; list them in "
            "project.dependencies"
        )
    options = _table(document, "tool", "uv")
    if refused := [key for key in options if key not in (*OF_UV, *IGNORED)]:
        raise Refused(
            f"{path} has tool.uv.{refused[0][:40]}, which is not used here: packages come from the "
            "operator's index, as wheels; remove it"
        )
    dependencies = [
        line
        for line in _requirements(project, "dependencies", path)
        if Requirement(line).name.lower() not in PROVIDED
    ]
    requires_python = project.get("requires-python") or ""
    if not isinstance(requires_python, str) or not _is_specifier(requires_python):
        raise Refused(
            f"{path} has project.requires-python = {str(requires_python)[:80]!r}; write it like "
            "'>=3.12'"
        )
    prerelease = options.get("prerelease") or ""
    if prerelease not in ("", *PRERELEASES):
        raise Refused(f"{path} has an unknown tool.uv.prerelease; use one of {PRERELEASES}")
    if not dependencies and not requires_python:
        return None
    return DeclaredPackages(
        path=path,
        requires_python=requires_python,
        dependencies=tuple(dependencies),
        overrides=tuple(_requirements(options, "override-dependencies", path)),
        constraints=tuple(_requirements(options, "constraint-dependencies", path)),
        prerelease=prerelease,
        lock=lock,
    )


def _read(tree: tarfile.TarFile, path: str, most: int) -> str | None:
    try:
        member = tree.getmember(path)
    except KeyError:
        return None
    if member.size > most:
        raise Refused(f"{path} has more than {most >> 10} KiB; shorten it")
    source = tree.extractfile(member)
    try:
        return source.read().decode() if source else ""
    except ValueError as error:
        raise Refused(f"{path} is not UTF-8 text: {error}; correct it") from error


def _requirements(table: Mapping[str, Any], key: str, path: str) -> list[str]:
    """The requirements in a list, each checked. Raises Refused."""
    listed = table.get(key) or []
    if not isinstance(listed, list) or not all(isinstance(line, str) for line in listed):
        raise Refused(f"{path} has {key} that is not a list of texts; correct it")
    if len(listed) > MOST_REQUIREMENTS:
        raise Refused(
            f"{path} has {len(listed)} {key}, more than {MOST_REQUIREMENTS}; remove those that others "
            "bring along"
        )
    for line in listed:
        _check(line, path)
    return listed


def _check(line: str, path: str) -> None:
    shown = line[:80]
    try:
        requirement = Requirement(line) if len(line) <= LONGEST else None
    except (InvalidRequirement, RecursionError):
        requirement = None
    if requirement is None or "\n" in line:
        raise Refused(
            f"{path} asks for {shown!r}, which is not a requirement; write it like 'numpy>=2'"
        )
    if requirement.url is not None:
        raise Refused(
            f"{path} asks for {shown!r}, and packages are installed from the index only, not from a "
            "path, URL or repository; name a released version"
        )


def _is_specifier(text: str) -> bool:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        return False
    return len(text) <= 200


def _table(document: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for key in keys:
        inner = document.get(key)
        document = inner if isinstance(inner, dict) else {}
    return document
