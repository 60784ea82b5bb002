"""How a workflow reaches the policy: by its socket, or by the relay on 127.0.0.1."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.blobs.artifacts import reference
from infra.model_api.gateway.server import HttpGateway
from infra.model_api.gateway.sessions import GatewaySession
from infra.ports.services import SandboxOwner
from infra.repositories.git.mirrors import GitRepositories
from infra.sandbox.sandbox import LocalUserCode
from infra.sandbox.user_process import user_group
from infra.settings.git import LAPTOP
from infra.settings.network_policy import NetworkPolicy
from schemas.artifact_refs import ArtifactRef
from schemas.errors import TransientError, UserCodeError
from schemas.ids import sample_id
from schemas.sampling import Message, SampleRecord
from schemas.specs import CommitSpec, Entrypoint, RolloutRef
from tests.kit.http_victim import Quick
from tests.kit.platform import make_workspace
from tests.kit.runsc import runsc
from tests.kit.secure_server import Secure, serving
from tests.kit.specs import group_spec, template

pytestmark = pytest.mark.processes

MAIN = """
import asyncio, json, os, ssl, subprocess, sys, threading, urllib.request
from headrace import AgentWorkflow, Grader

ASK = '''
import json, sys, urllib.request
url, key = sys.argv[1:]
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
request = urllib.request.Request(
    url + "/chat/completions", body,
    {"authorization": "Bearer " + key, "content-type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
'''


class Do(AgentWorkflow):
    async def run(self, ctx):
        what = ctx.prompt[0]["content"]
        hi = [{"role": "user", "content": "hi"}]
        if what == "chat":
            said = (await ctx.chat(hi))["content"]
        elif what == "many":
            answers = await asyncio.gather(*(ctx.chat(hi) for _ in range(64)))
            said = answers[-1]["content"]
        elif what == "exit":
            os._exit(3)
        elif what == "child":
            argv = [sys.executable, "-c", ASK, ctx.base_url, ctx.api_key]
            said = await asyncio.to_thread(subprocess.check_output, argv, text=True)
        elif what.startswith("as "):
            ctx = type(ctx)(
                prompt=[], metadata={}, api_key=what.split()[2], socket=ctx.socket,
                base_url=ctx.base_url.rpartition("/")[0] + "/" + what.split()[1],
            )
            said = (await ctx.chat(hi))["content"]
        elif what.startswith("fetch "):
            context = ssl._create_unverified_context()
            said = await asyncio.to_thread(
                lambda: urllib.request.urlopen(what[6:], context=context).read().decode()
            )
        else:
            said = json.dumps([threading.active_count(), sorted(os.environ)])
        return [{"role": "assistant", "content": said.strip()}]


class Check(Grader):
    async def grade(self, ctx):
        names = [thread.name for thread in threading.enumerate()]
        found = [name for name in os.environ if "GATEWAY" in name]
        for name in ctx.samples:
            ctx.set_sample_reward(name, float(len(found) + ("relay" in names)))
"""


@dataclass
class Bench:
    """User code with a gateway, and the rollout to run."""

    user: LocalUserCode
    gateway: HttpGateway
    rollout: RolloutRef
    secure: Secure

    async def run(self, what: str, *, run: str = "r1", index: int = 0) -> str:
        """The answer of a workflow in its own session of the run `r1`, in a sandbox of `run`."""
        session = self.session(index)
        result = await self.user.run_workflow(
            self.rollout,
            owner=SandboxOwner(run=run),
            sample=f"{run}-{index}",
            prompt=[Message(role="user", content=what)],
            metadata={},
            base_path=session.base_path,
            api_key=session.api_key,
        )
        assert result.messages is not None
        return result.messages[-1].content

    def session(self, index: int) -> GatewaySession:
        return self.gateway.open(group_spec(template()), index, deadline_s=30)


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[Secure]:
    async with serving(tmp_path, host="127.0.0.2") as made:
        yield made


@pytest.fixture
def level() -> str:
    return "bwrap"


at_all_levels = pytest.mark.parametrize(
    "level", ["bwrap", pytest.param("gvisor", marks=pytest.mark.gvisor), "process-trusted"]
)


@pytest.fixture
async def bench(tmp_path: Path, secure: Secure, level: str) -> AsyncIterator[Bench]:
    source = make_workspace(tmp_path / "w", {"rollouts/say/main.py": MAIN})
    repositories = GitRepositories(tmp_path / "git", settings=LAPTOP)
    sha = await repositories.fetch("w", CommitSpec(url=str(source)))
    snapshot = await repositories.snapshot("w", sha)

    async def fetch(ref: ArtifactRef) -> bytes:
        return snapshot

    rollout = RolloutRef(
        snapshot=reference(snapshot),
        commit=sha,
        entrypoint=Entrypoint(rollout="say"),
        workflow="Do",
        grader="Check",
        workflow_timeout_s=20,
    )
    policy = NetworkPolicy.parse(f"*={secure.address}")
    gateway = HttpGateway(Quick(), group=user_group(), network=policy)
    await gateway.start()
    if level == "gvisor":
        runsc()
    user = LocalUserCode(level, fetch=fetch, sockets=gateway)
    yield Bench(user, gateway, rollout, secure)
    await user.aclose()
    await gateway.aclose()


@at_all_levels
@pytest.mark.parametrize("what", ["chat", "many", "child"])
async def test_a_workflow_reaches_the_policy(bench: Bench, what: str) -> None:
    assert await bench.run(what) == "here"


@at_all_levels
async def test_the_key_of_another_runs_sample_is_of_no_use(bench: Bench) -> None:
    other = bench.session(1)
    sample = sample_id(other.spec.group_key.id, 1)
    assert await bench.run(f"as {sample} {other.api_key}") == "here", "its own run may"
    with pytest.raises(UserCodeError, match="no such sample"):
        await bench.run(f"as {sample} {other.api_key}", run="r2", index=2)


async def test_a_grader_has_no_socket_and_no_relay(bench: Bench) -> None:
    record = SampleRecord(index=0, messages=())
    grades = (
        await bench.user.grade(
            bench.rollout,
            owner=SandboxOwner(run="r1"),
            group="g",
            label=None,
            metadata={},
            samples=[record],
        )
    ).grades
    assert [grade.reward for grade in grades] == [0.0]


async def test_a_socket_is_closed_with_its_process(bench: Bench) -> None:
    await bench.run("chat")
    directory = bench.gateway.socket_directory
    assert directory is not None
    assert len(list(directory.glob("*.sock"))) == 1
    await bench.run("chat", index=1)
    (first,) = directory.glob("*.sock")
    with pytest.raises(TransientError):
        await bench.run("exit")
    await bench.run("chat", index=1)
    (second,) = directory.glob("*.sock")
    assert second != first


@at_all_levels
async def test_a_workflow_reaches_the_addresses_of_its_run(bench: Bench) -> None:
    address = bench.secure.address
    bench.rollout = bench.rollout.model_copy(update={"network": (address,)})
    assert await bench.run(f"fetch https://{address}/") == "hello"
    with pytest.raises(UserCodeError, match="403"):
        await bench.run("fetch https://127.0.0.3:1/")


async def test_without_a_network_no_proxy_is_named(bench: Bench) -> None:
    _, names = json.loads(await bench.run("look"))
    assert not [name for name in names if "proxy" in name.lower()]
