"""Every module of the product can be imported on this Python, and no import warns."""

import subprocess
import sys

from tests.kit.source import ROOT, modules, relative

PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
"""

STARTS = "__main__"
"""A module of this name runs a program when it is imported."""

IN_ROLLOUTS = {"headrace.graders.generated_tasks", "headrace.graders.mathematics"}
"""Modules that need a package which only a rollout installs."""


def test_every_module_can_be_imported_without_a_warning() -> None:
    names = [
        relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in modules()
        if path.stem != STARTS
    ]
    assert len(names) > 500
    names = sorted(set(names) - IN_ROLLOUTS)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
