"""User code runs with the packages of its rollout, behind the sandbox service, as a worker starts it."""

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from consumers.sync.discovery import discover_rollouts
from infra.blobs.artifacts import reference
from infra.ports.services import SandboxOwner, UserCode
from infra.sandbox.environments.interpreters import find_pythons
from infra.sandbox.environments.removal import make_room
from infra.sandbox.sandbox import LocalUserCode
from infra.sandbox.service.child import ChildService
from infra.sandbox.service.client import SandboxClient
from infra.settings.packages import PackageSettings
from schemas.artifact_refs import ArtifactRef
from schemas.errors import UserCodeError
from schemas.sampling import Message, SampleRecord
from schemas.specs import DiscoveredRollout, Entrypoint, RolloutRef
from tests.kit.package_index import LocalIndex, serve_index
from tests.kit.runsc import runsc
from tests.kit.sockets import DeadSockets

pytestmark = pytest.mark.processes

OWNER = SandboxOwner(run="run-1")
MAIN = """
import sys
import one, beside, common, late
from headrace import AgentWorkflow, Grader

class Do(AgentWorkflow):
    async def run(self, ctx):
        if ctx.prompt[0]["content"] == "write":
            open(one.__file__, "w")
        if ctx.prompt[0]["content"] == "missing":
            import numpy_of_nobody
        version = ".".join(map(str, sys.version_info[:2]))
        text = f"{one.VERSION} {beside.NAME} {common.NAME} {late.NAME} {version}"
        return [{"role": "assistant", "content": text}]

class Check(Grader):
    async def grade(self, ctx):
        import two
        for name in ctx.samples:
            ctx.set_sample_reward(name, float(two.VERSION))
"""
FILES = {
    "rollouts/say/agent/main.py": MAIN,
    "rollouts/say/agent/beside.py": 'NAME = "beside"',
    "rollouts/say/late.py": 'NAME = "late"',
    "code/common.py": 'NAME = "common"',
    "headrace.toml": '[workspace]\nshared = ["code"]\n',
    "rollouts/plain/main.py": "import one",
}
PYPROJECT = """[project]
name = "say"
version = "0"
requires-python = "REQUIRES"
dependencies = ["one", "two<2", "headrace"]
[build-system]
requires = ["nothing-like-this"]
build-backend = "evil"
"""
SAY = Entrypoint(rollout="say", path="agent/main.py")
PLAIN = Entrypoint(rollout="plain")


class Store:
    """Artifacts in memory."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}

    async def put_artifact(
        self,
        data: bytes,
        *,
        run: str,
        blob: bool = False,
        sha256: str | None = None,
        shared: bool = False,
    ) -> ArtifactRef:
        ref = reference(data)
        self._held[ref.sha256] = data
        return ref

    async def get_artifact(self, ref: ArtifactRef, *, cached: bool = True) -> bytes:
        return self._held[ref.sha256]

    async def discard(self, ref: ArtifactRef) -> None:
        self._held.pop(ref.sha256, None)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    """An index that the settings of this process name, with a directory for environments."""
    root = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    root.chmod(0o755)
    with serve_index(tmp_path / "index") as made:
        made.add_wheel("one", "1.0")
        made.add_wheel("two", "1.0")
        monkeypatch.setenv("HEADRACE_PACKAGE_INDEX", made.url)
        monkeypatch.setenv("HEADRACE_ENVIRONMENTS", str(root / "environments"))
        yield made
    shutil.rmtree(root)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture(
    params=["bwrap", "process-trusted", pytest.param("gvisor", marks=pytest.mark.gvisor)]
)
async def user(
    request: pytest.FixtureRequest,
    index: LocalIndex,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[SandboxClient]:
    if request.param == "gvisor":
        monkeypatch.setenv("HEADRACE_RUNSC", str(runsc()))
    sockets = DeadSockets()
    made = SandboxClient(ChildService(request.param), fetch=store.get_artifact, sockets=sockets)
    yield made
    await made.aclose()
    sockets.close()


def snapshot(requires: str, *, main: str = MAIN) -> bytes:
    files = {
        **FILES,
        "rollouts/say/agent/main.py": main,
        "rollouts/say/pyproject.toml": PYPROJECT.replace("REQUIRES", requires),
    }
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, text in files.items():
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(text), 0o644
                tar.addfile(member, io.BytesIO(text.encode()))
        return buffer.getvalue()


async def discover(
    user: SandboxClient, store: Store, tree: bytes
) -> tuple[DiscoveredRollout, DiscoveredRollout]:
    found = await discover_rollouts(
        tree, (SAY, PLAIN), user=user, artifacts=store, owner="workspace"
    )
    by_name = {one.entrypoint.rollout: one for one in found}
    return by_name["say"], by_name["plain"]


async def rollout_in(user: SandboxClient, store: Store, requires: str) -> RolloutRef:
    """The rollout as a run has it that starts after a sync."""
    tree = snapshot(requires)
    found, plain = await discover(user, store, tree)
    assert plain.environment is None
    assert "No module named 'one'" in (plain.error or "")
    assert "rollouts/plain/pyproject.toml" in (plain.error or "")
    assert found.error is None
    assert found.environment is not None
    return RolloutRef(
        snapshot=await store.put_artifact(tree, run="workspace"),
        commit="0" * 40,
        entrypoint=SAY,
        workflow=found.workflow,
        grader=found.grader,
        environment=found.environment,
    )


async def say(user: UserCode, rollout: RolloutRef, what: str) -> str:
    result = await user.run_workflow(
        rollout,
        owner=OWNER,
        sample=what,
        prompt=[Message(role="user", content=what)],
        metadata={},
        base_path="/v1/samples/s",
        api_key="key",
    )
    assert result.messages is not None
    return result.messages[0].content


async def test_a_rollout_imports_what_it_asks_for_and_others_do_not(
    user: SandboxClient, store: Store, request: pytest.FixtureRequest
) -> None:
    """At the default level with the last Python of this machine, which may have to be copied."""
    is_default = request.node.callspec.params["user"] == "bwrap"
    python = find_pythons(PackageSettings.load({}).pythons)[-1 if is_default else 0]
    rollout = await rollout_in(user, store, f"=={python.text}")
    text = await say(user, rollout, "hello")
    assert text == f"1.0 beside common late {python.minor}"
    graded = await user.grade(
        rollout,
        owner=OWNER,
        group="g",
        label=None,
        metadata={},
        samples=[SampleRecord(index=0, text="x")],
    )
    assert [grade.reward for grade in graded.grades] == [1.0]
    with pytest.raises(UserCodeError, match=r"numpy_of_nobody.*rollouts/say/pyproject\.toml"):
        await say(user, rollout, "missing")
    with pytest.raises(UserCodeError, match=r"PermissionError|Read-only"):
        await say(user, rollout, "write")


async def test_an_environment_is_in_use_while_a_process_has_it(
    index: LocalIndex, store: Store
) -> None:
    local = LocalUserCode("bwrap", fetch=store.get_artifact)
    tree = snapshot(">=3.11")
    broken = snapshot(">=3.11", main="import one\nraise ValueError")
    directory = PackageSettings.load(os.environ).directory
    for each in (tree, broken):
        (found,) = await discover_rollouts(
            each, (SAY,), user=local, artifacts=store, owner="workspace"
        )
    assert "ValueError" in (found.error or "")
    (place,) = directory.glob("?" * 64)
    rollout = RolloutRef(
        snapshot=await store.put_artifact(tree, run="workspace"),
        commit="0" * 40,
        entrypoint=SAY,
        workflow="Do",
        grader=None,
        environment=found.environment,
    )
    await say(local, rollout, "hello")
    assert make_room(directory, 0) == 0
    for process in tuple(local._warm.processes):
        await local._end(process)
    assert make_room(directory, 0) == 1
    assert not place.exists()
    await local.aclose()
