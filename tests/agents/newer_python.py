"""Finds a Python for packages that need a newer one than ours may be, and environments with it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.kit.package_environment import shared_environment

PACKAGES = {
    "osmosis": "osmosis-ai[server,strands,openai-agents]==0.3.8",
    "older_osmosis": "osmosis-ai[server,strands,openai-agents]==0.2.31",
    "verifiers": "verifiers==0.4.0",
    "openenv": "verifiers[openenv]==0.4.0",
    "older_verifiers": "verifiers==0.1.14",
}
OSMOSIS = ("certifi>=2024", "litellm<1.106")
OVERRIDES = {"osmosis": OSMOSIS, "older_osmosis": OSMOSIS}
LEFT_OUT = {"older_verifiers": ("wget; python_version < '3'",)}
"""Packages without a wheel, which are not needed here."""

CHECK = "import sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))"


def find_newer_python() -> str:
    """Return a Python 3.12 or 3.13 of this machine. Without one, the test is skipped, and in CI it
    fails."""
    for candidate in _candidates():
        if (
            subprocess.run([candidate, "-c", CHECK], capture_output=True, check=False).returncode
            == 0
        ):
            return candidate
    if os.environ.get("CI"):
        pytest.fail("this machine has no Python 3.12; install one")
    pytest.skip("this machine has no Python 3.12")


def _candidates() -> Iterator[str]:
    yield sys.executable
    for name in ("python3.12", "python3.13"):
        if found := shutil.which(name):
            yield found
    for root in (Path.home() / ".pyenv" / "versions", Path("/opt/hostedtoolcache/Python")):
        yield from (str(path) for path in sorted(root.glob("3.1[23]*/**/bin/python"))[:8])


def project_of(
    packages: Sequence[str], *, requires: str = "", overrides: Sequence[str] = ()
) -> str:
    """The `pyproject.toml` of a rollout with these packages."""
    lines = ["[project]", 'name = "tested"', 'version = "0"']
    lines += [f'requires-python = "{requires}"'] if requires else []
    lines += [f"dependencies = {json.dumps(packages)}", "[tool.uv]"]
    return "\n".join([*lines, f"override-dependencies = {json.dumps(overrides)}", ""])


def served_project(name: str) -> str:
    """The `pyproject.toml` of a rollout with a package of PACKAGES."""
    overrides = [*OVERRIDES.get(name, ()), *LEFT_OUT.get(name, ())]
    return project_of([PACKAGES[name]], requires=">=3.12,<3.14", overrides=overrides)


def packaged(name: str) -> Path:
    """Return the Python of an environment with a package of PACKAGES."""
    return shared_environment(
        [PACKAGES[name]], interpreter=find_newer_python(), overrides=OVERRIDES.get(name, ())
    )
