"""A worker may open as many files as its hard limit lets it, because requests have connections."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))
from consumers.process.worker import raise_file_limit
raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.processes
def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    argv = [sys.executable, "-c", SCRIPT]
    assert subprocess.check_output(argv, text=True).split() == ["2048", "2048"]
