"""The next release of Headrace, as a copy of its packages with a patch: an event of a new type, a higher
version of a known one with its upcast, and a higher decider version."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from tests.kit.platform import ROOT

PACKAGES = ("schemas", "infra", "trainer", "consumers", "producers", "headrace")

NOTED = '''

class RunNoted(BaseRunEvent):
    """Only the next release knows this."""

    type: ClassVar[str] = "rl.run.noted"
'''

PATCH: tuple[tuple[str, str, str], ...] = (
    ("schemas/events/decider_version.py", "DECIDER_VERSION = 3", "DECIDER_VERSION = 4"),
    (
        "schemas/events/runs.py",
        'type: ClassVar[str] = "rl.run.requested"\n',
        'type: ClassVar[str] = "rl.run.requested"\n    version: ClassVar[int] = 2\n    place: str\n',
    ),
    (
        "schemas/events/upcasts.py",
        "UPCASTS: dict[tuple[str, int], Upcast] = {\n",
        "UPCASTS: dict[tuple[str, int], Upcast] = {\n"
        '    ("rl.run.requested", 1): lambda payload: {**payload, "place": "before"},\n',
    ),
    ("schemas/events/__init__.py", "    RunPaused,\n", "    RunNoted,\n    RunPaused,\n"),
    (
        "schemas/events/__init__.py",
        "    RunFinished,\n    RunRenamed,\n",
        "    RunFinished,\n    RunNoted,\n    RunRenamed,\n",
    ),
    ("producers/core/submit.py", "run_name=await", 'place="here",\n            run_name=await'),
    ("consumers/run/state.py", "    | RunDeleted\n)", "    | RunDeleted\n    | RunNoted\n)"),
    ("consumers/run/state.py", "    RunPaused,\n", "    RunNoted,\n    RunPaused,\n"),
    (
        "consumers/run/state.py",
        "        case RunApproved():\n",
        "        case RunNoted():\n            return state\n        case RunApproved():\n",
    ),
    ("consumers/run/consumer.py", "    RunPaused,\n", "    RunNoted,\n    RunPaused,\n"),
    (
        "consumers/run/consumer.py",
        "    events = (*recorded, *follow(state))\n",
        "    events = (*recorded, *follow(state))\n"
        "    if state.request.decider >= 4 and any(isinstance(e, RunStarted) for e in events):\n"
        "        events = (*events, RunNoted(run=state.request.run))\n",
    ),
)
"""Files, and what the next release has in them instead. It appends the new event, and the new version of
the known one, only in runs of its own decider version."""


def make_next_release(directory: Path) -> Path:
    """Write the packages of the next release below a directory, and return it."""
    make_release(directory, PATCH)
    runs = directory / "schemas/events/runs.py"
    runs.write_text(runs.read_text() + NOTED)
    return directory


def make_release(directory: Path, patch: Iterable[tuple[str, str, str]]) -> Path:
    """Write our packages below a directory, with a patch, and return it."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, directory / package, ignore=ignored)
    for name, old, new in patch:
        path = directory / name
        text = path.read_text()
        assert old in text, f"{name} has changed: {old!r}"
        path.write_text(text.replace(old, new, 1))
    return directory
