"""The packages of a rollout from the real index of packages."""

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.ports.packages import DeclaredPackages
from infra.sandbox.environments.environments import PackageEnvironments
from infra.sandbox.levels.probe import choose_level
from infra.settings.packages import PackageSettings
from schemas.artifact_refs import ArtifactRef
from schemas.errors import Refused
from schemas.specs import PackageEnvironment

pytestmark = [pytest.mark.agents, pytest.mark.processes]

PATH = "rollouts/agent/pyproject.toml"


@pytest.fixture
def environments() -> Iterator[PackageEnvironments]:
    root = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    root.chmod(0o755)
    made = PackageEnvironments(
        choose_level("bwrap"), PackageSettings(directory=root / "environments")
    )
    yield made
    made.close()
    shutil.rmtree(root)


async def test_an_agent_sdk_is_installed_and_imported(environments: PackageEnvironments) -> None:
    declared = DeclaredPackages(path=PATH, dependencies=("openai>=3.52",))
    resolved = await environments.resolve(declared)
    assert resolved.count > 5
    pins = resolved.pins.encode()
    lock = ArtifactRef(uri="m:", sha256=hashlib.sha256(pins).hexdigest(), size=len(pins))
    ref = PackageEnvironment(
        key=resolved.key, lock=lock, python=resolved.python, platform=resolved.platform
    )
    python = (await environments.get(ref, pins)).path
    program = "import openai, pydantic; print(openai.__file__)"
    said = subprocess.run(  # noqa: ASYNC221 - it takes a second
        [python, "-I", "-c", program], capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith(str(python.parents[1]))


async def test_versions_that_do_not_fit_together_are_said_by_uv(
    environments: PackageEnvironments,
) -> None:
    declared = DeclaredPackages(path=PATH, dependencies=("openai>=3.52", "openai<1"))
    with pytest.raises(Refused, match=r"(?s)rollouts/agent/pyproject\.toml.*openai"):
        await environments.resolve(declared)
