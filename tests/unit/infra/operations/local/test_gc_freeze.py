"""A process collects nothing while it imports libraries, and does not search them afterwards."""

import subprocess
import sys

IMPORTS = """
import gc
from infra.operations.local import gc_freeze

collected = []
gc.callbacks.append(lambda phase, about: collected.append(phase))
try:
    with gc_freeze.collect_nothing():
        loaded = [[n] for n in range(10_000)]
        assert not collected
        {in_the_middle}
finally:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000
    assert all(one is not loaded for one in gc.get_objects())
    print("frozen")
"""


def test_nothing_is_collected_until_everything_is_imported() -> None:
    assert run(IMPORTS.format(in_the_middle="pass")) == (0, "frozen\n")


def test_the_collector_works_again_after_an_import_that_fails() -> None:
    assert run(IMPORTS.format(in_the_middle="import no_such_module")) == (1, "frozen\n")


def run(program: str) -> tuple[int, str]:
    """Run it in a process of its own, because what is frozen stays frozen."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.returncode, done.stdout
