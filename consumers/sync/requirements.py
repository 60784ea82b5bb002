"""Checks whether the dependencies that a rollout's `pyproject.toml` declares are available.

User code runs on the standard library and `headrace`. A rollout that needs anything else would fail at
its first import, in the middle of a run. So it is refused when its commit is synced.
"""

import re
import tarfile
import tomllib
from collections.abc import Iterator, Mapping

MOST_BYTES = 64 << 10
"""The longest `pyproject.toml` that is parsed: it comes from a hostile repository."""

CAN_IMPORT = (
    "a rollout can import only the standard library, headrace and the files in the folder of its "
    "entry point"
)
PROVIDED = ("headrace", "python")


def unmet_requirements(tree: tarfile.TarFile, rollout: str) -> str | None:
    """Return why the rollout cannot run with the installed packages, and which file to edit. Returns
    None if it can run."""
    path = f"rollouts/{rollout}/pyproject.toml"
    try:
        member = tree.getmember(path)
    except KeyError:
        return None
    if member.size > MOST_BYTES:
        return f"{path} has more than {MOST_BYTES >> 10} KiB; shorten it"
    source = tree.extractfile(member)
    try:
        document = tomllib.loads(source.read().decode() if source else "")
    except (ValueError, RecursionError) as error:
        return f"{path} is not valid TOML: {error}; correct it"
    missing = [name for name in _declared_dependencies(document) if _name(name) not in PROVIDED]
    if not missing:
        return None
    listed = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
    return (
        f"{path} asks for {listed}, and dependencies are not installed yet: {CAN_IMPORT}. Remove them "
        f"from {path} and from the code"
    )


def _declared_dependencies(document: Mapping[str, object]) -> Iterator[str]:
    """Yield the dependencies of a project as its file writes them."""
    project = _table(document, "project")
    listed = project.get("dependencies")
    if isinstance(listed, list):
        yield from map(str, listed)
    dynamic = project.get("dynamic")
    if isinstance(dynamic, list) and "dependencies" in dynamic:
        yield "dynamic dependencies"
    yield from _table(document, "tool", "poetry", "dependencies")


def _table(document: Mapping[str, object], *keys: str) -> Mapping[str, object]:
    for key in keys:
        inner = document.get(key)
        document = inner if isinstance(inner, dict) else {}
    return document


def _name(requirement: str) -> str:
    """Return the normalized name of a requirement: `Headrace>=0.1` gives `headrace`."""
    return re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0].lower()
