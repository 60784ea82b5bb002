"""The directories from which a rollout imports: its own, and the shared code that `headrace.toml` names.

`[workspace] shared = ["shared/"]` names folders of the workspace. A folder with an `__init__.py` is a
package, which is imported by its name. The modules of any other folder are imported by theirs.
"""

import tomllib
from pathlib import Path

from headrace.error_location import rollout_folder, tree_of

FILE = "headrace.toml"
LARGEST_FILE = 64 << 10
MOST_FOLDERS = 16


class InvalidShared(ValueError):
    """The shared code of a workspace cannot be used; the text says why."""


def import_paths(entry: Path) -> list[str]:
    """Return the directories from which an entry point imports, in order. Raises InvalidShared."""
    own = (entry.parent, rollout_folder(entry))
    shared = (place.parent if _is_package(place) else place for place in shared_folders(entry))
    return list(dict.fromkeys(map(str, (*own, *shared))))


def shared_folders(entry: Path) -> list[Path]:
    """Return the folders with the shared code of a workspace. Raises InvalidShared."""
    workspace = tree_of(entry)
    names = _shared_names(workspace / FILE)
    return [_folder(workspace, name) for name in names]


def _shared_names(path: Path) -> list[object]:
    if not path.is_file():
        return []
    if path.stat().st_size > LARGEST_FILE:
        raise InvalidShared(f"{FILE} has more than {LARGEST_FILE} bytes; shorten it")
    try:
        table = tomllib.loads(path.read_text()).get("workspace", {})
    except (ValueError, RecursionError) as error:
        raise InvalidShared(f"{FILE} cannot be read: {error}; correct it") from error
    names = table.get("shared", []) if isinstance(table, dict) else None
    if not isinstance(names, list) or len(names) > MOST_FOLDERS:
        raise InvalidShared(
            f"{FILE}: workspace.shared must be a list of at most {MOST_FOLDERS} folders, like "
            '["shared/"]'
        )
    return names


def _folder(workspace: Path, name: object) -> Path:
    place = (workspace / str(name)).resolve() if isinstance(name, str) else workspace
    inside = place != workspace.resolve() and place.is_relative_to(workspace.resolve())
    if not isinstance(name, str) or not inside or not place.is_dir():
        raise InvalidShared(
            f"{FILE}: workspace.shared names {str(name)[:80]!r}, which is not a folder of the "
            "workspace; correct it"
        )
    return place


def _is_package(place: Path) -> bool:
    return (place / "__init__.py").is_file()
