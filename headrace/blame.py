"""Finds the line of the workspace's code that an error came from.

Only frames of the workspace count. If a grader calls `json.loads` on bad text, the error names the
line of the grader and not a line of the standard library.
"""

import sys
import traceback
from pathlib import Path

LONGEST = 2000
"""Characters of an error that are passed on."""

MOST_CALLERS = 4


def blame(error: BaseException, entry: Path) -> str:
    """Return `rollouts/<rollout>/<file>:<line> in <function>: <Type>: <text>`, and the callers among the
    workspace's functions, innermost first. If no frame belongs to the workspace, the text names no
    line."""
    frames = own_frames(error, entry)
    text, kind = _text(error), type(error).__name__
    what = f"{kind}: {text}{import_hint(error, entry)}" if text else kind
    if not frames:
        return what[:LONGEST]
    first, *callers = [
        f"{workspace_path(Path(f.filename), entry)}:{f.lineno} in {f.name}" for f in frames
    ]
    text_with_place = f"{first}: {what}"[:LONGEST]
    if callers:
        text_with_place += f" (called from {', '.join(callers[:MOST_CALLERS])})"
    return text_with_place[:LONGEST]


def own_traceback(error: BaseException, entry: Path) -> str:
    """Return the traceback of an error and of its causes as Python writes it, with the frames of the
    workspace only."""
    try:
        whole = traceback.TracebackException.from_exception(error, compact=True)
        _keep_own(whole, entry)
        return "".join(whole.format()).strip()
    except BaseException:  # user code's own exceptions do whatever they like
        return blame(error, entry)


def own_stack(thread: int, entry: Path) -> str | None:
    """Return the place where a thread is now, as a traceback with the frames of the workspace only, or
    None when none of its frames is the workspace's."""
    root = tree_of(entry)
    frames = traceback.extract_stack(sys._current_frames().get(thread))
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(root)]
    for frame in own:
        _ = frame.line  # it is read from the file, which has another name below
        frame.filename = workspace_path(Path(frame.filename), entry)
    if not own:
        return None
    return "It was here (most recent call last):\n" + "".join(traceback.format_list(own)).rstrip()


def _keep_own(shown: traceback.TracebackException, entry: Path) -> None:
    """Drop the frames of libraries, and name the files of the others as the workspace does."""
    root = tree_of(entry)
    left: list[traceback.TracebackException | None] = [shown]
    while left:
        each = left.pop()
        if each is None:
            continue
        own = [frame for frame in each.stack if Path(frame.filename).is_relative_to(root)]
        for frame in own:
            _ = frame.line  # it is read from the file, which has another name below
            frame.filename = workspace_path(Path(frame.filename), entry)
        each.stack[:] = own
        left += [each.__cause__, each.__context__, *(each.exceptions or ())]


def import_hint(error: BaseException, entry: Path) -> str:
    """Return a hint about the file that names a rollout's packages, to show after an import error."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    file = f"{workspace_path(rollout_folder(entry), entry)}/pyproject.toml"
    return f" (if a package has this module, add the package to project.dependencies in {file})"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # user code's `__str__` raises whatever it likes
        return "the text of this error cannot be read, because its `__str__` raised"


def own_frames(error: BaseException, entry: Path) -> list[traceback.FrameSummary]:
    """Return the frames of a traceback that are the workspace's own code, innermost first."""
    root = tree_of(entry)
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in reversed(frames) if Path(f.filename).is_relative_to(root)]


def workspace_path(file: Path, entry: Path) -> str:
    """Return the path as the workspace names it: rollouts/<rollout>/<file>."""
    root = tree_of(entry)
    return str(file.relative_to(root)) if file.is_relative_to(root) else file.name


def rollout_folder(entry: Path) -> Path:
    """Return the folder of the rollout that contains an entry point: the one below `rollouts`."""
    return next((place for place in entry.parents if place.parent.name == "rollouts"), entry.parent)


def tree_of(entry: Path) -> Path:
    """Return the root of the workspace that contains an entry point: the directory above `rollouts`."""
    above = next((place for place in entry.parents if place.name == "rollouts"), entry.parent)
    return above.parent
