"""Finds the line of the workspace's code that an error came from.

Only frames of the workspace count. If a grader calls `json.loads` on bad text, the error names the
line of the grader and not a line of the standard library.
"""

import errno
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

LONGEST = 2000
"""Characters of an error that are passed on."""

MOST_CALLERS = 4
MOST_CAUSES = 16


def locate_error(error: BaseException, entry: Path) -> str:
    """Return `rollouts/<rollout>/<file>:<line> in <function>: <Type>: <text>`, and the callers among the
    workspace's functions, innermost first. If no frame belongs to the workspace, the text names no
    line."""
    frames = own_frames(error, entry)
    what = describe(error, entry)
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
        return locate_error(error, entry)


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


def describe(error: BaseException, entry: Path) -> str:
    """Return the type and the text of an error, and what to do about it if that is known."""
    text, kind = _text(error), type(error).__name__
    return (f"{kind}: {text}" if text else kind) + hint(error, entry)


def hint(error: BaseException, entry: Path) -> str:
    """Return in brackets what to do about an error, or nothing if that is not known."""
    if isinstance(error, ModuleNotFoundError):
        file = f"{workspace_path(rollout_folder(entry), entry)}/pyproject.toml"
        return f" (if a package has this module, add the package to project.dependencies in {file})"
    if isinstance(error, SystemExit):
        return " (leave out sys.exit, because it ends no program here)"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return " (the workspace is read-only here; write the file into ctx.artifacts_dir)"
    if any(isinstance(one, socket.gaierror) for one in _chain(error)):
        return " (user code reaches only the hosts that advanced.network names)"
    return ""


def last_place(error: BaseException, entry: Path) -> str | None:
    """Return the innermost line of the workspace in an error, or else in the errors that led to it."""
    for one in _chain(error):
        if frames := own_frames(one, entry):
            first = frames[0]
            return f"{workspace_path(Path(first.filename), entry)}:{first.lineno} in {first.name}"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that led to it, the latest first."""
    one: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if one is None:
            return
        yield one
        one = one.__cause__ or one.__context__


def _text(error: BaseException) -> str:
    try:
        if isinstance(error, ImportError) and error.path:
            return str(error).removesuffix(f" ({error.path})")  # the place in the sandbox
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
