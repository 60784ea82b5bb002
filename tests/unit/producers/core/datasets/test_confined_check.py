"""The confined process that reads an uploaded file."""

import subprocess
import sys

from tests.kit.source import ROOT

PROGRAM = """
import sys
import producers.core.datasets.confined_check
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"infra", "asyncpg", "starlette"}))
"""


def test_it_imports_neither_the_database_nor_the_api() -> None:
    """Each upload waits for its imports."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
