"""User code by a sandbox service: the answers and errors are those of a local sandbox, over both ways to
reach a service, and nothing is lost when it dies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from infra.ports.services import SandboxOwner, UserCode
from infra.sandbox.service import peer
from infra.sandbox.service.child import ChildService
from infra.sandbox.service.client import SandboxClient
from infra.sandbox.service.connect import RemoteService
from infra.sandbox.service.listener import SandboxListener
from schemas.artifact_refs import ArtifactRef
from schemas.errors import CorruptData, FailureCategory, StoreAway, TransientError, UserCodeError
from schemas.sampling import Message, SampleRecord
from schemas.secrets.secret_value import SecretValue
from schemas.specs import RolloutRef
from tests.kit.sandbox_certificates import tls_context
from tests.kit.sockets import DeadSockets
from tests.kit.user_snapshots import rollout_of, snapshot_of

pytestmark = pytest.mark.processes

MAIN = """
import asyncio, os, socket
from headrace import AgentWorkflow, Grader


class Do(AgentWorkflow):
    async def run(self, ctx):
        what = ctx.prompt[0]["content"]
        if what == "raise":
            raise ValueError("as asked")
        if what == "sleep":
            await asyncio.sleep(3600)
        if what == "secret":
            what = os.environ["MINE"][::-1]  # in a form that is not masked
        return [{"role": "assistant", "content": what}]


class Check(Grader):
    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            ctx.set_sample_reward(name, len(sample.text))
"""
SNAPSHOT = snapshot_of(MAIN)
LEVEL = "bwrap"


class Blobs:
    """Where the snapshot is read from; counts how often."""

    def __init__(self) -> None:
        self.num_read = 0
        self.error: Exception | None = None

    async def fetch(self, ref: ArtifactRef) -> bytes:
        self.num_read += 1
        if self.error is not None:
            raise self.error
        return SNAPSHOT


@pytest.fixture
def sockets() -> Iterator[DeadSockets]:
    made = DeadSockets()
    yield made
    made.close()


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


@pytest.fixture(params=["child", "tcp"])
async def user(
    request: pytest.FixtureRequest, blobs: Blobs, sockets: DeadSockets
) -> AsyncIterator[SandboxClient]:
    listener = SandboxListener("tcp://127.0.0.1:0", tls_context("service"), level=LEVEL)
    service: ChildService | RemoteService = ChildService(LEVEL)
    if request.param == "tcp":
        await listener.listen()
        service = RemoteService("127.0.0.1", listener.port, tls_context("client"))
    made = SandboxClient(service, fetch=blobs.fetch, sockets=sockets)
    await made.start()
    yield made
    await made.aclose()
    await listener.aclose()


@pytest.fixture
async def child(blobs: Blobs, sockets: DeadSockets) -> AsyncIterator[SandboxClient]:
    made = SandboxClient(ChildService(LEVEL), fetch=blobs.fetch, sockets=sockets)
    yield made
    await made.aclose()


def rollout(**changes: object) -> RolloutRef:
    return rollout_of(SNAPSHOT).model_copy(update=changes)


async def say(
    user: UserCode, what: str, *, of: RolloutRef | None = None, owner: SandboxOwner | None = None
) -> str:
    result = await user.run_workflow(
        of or rollout(),
        owner=owner or SandboxOwner("run-1"),
        sample=what[:100],
        prompt=[Message(role="user", content=what)],
        metadata={},
        base_path="/v1/samples/s",
        api_key="key",
    )
    assert result.messages is not None
    return result.messages[0].content


async def test_answers_are_those_of_user_code(user: SandboxClient) -> None:
    found = await user.discover(SNAPSHOT, ())
    assert [(one.workflow, one.grader) for one in found] == [("Do", "Check")]
    assert await say(user, "hello ä \x00") == "hello ä \x00"
    samples = [SampleRecord(index=n, text="x" * n) for n in range(3)]
    grades = (
        await user.grade(
            rollout(),
            owner=SandboxOwner("run-1"),
            group="g",
            label=None,
            metadata={},
            samples=samples,
        )
    ).grades
    assert [grade.reward for grade in grades] == [0.0, 1.0, 2.0]


async def test_secrets_reach_their_run_alone(user: SandboxClient) -> None:
    owner = SandboxOwner("run-2", {"MINE": SecretValue("a secret value")})
    assert await say(user, "secret", owner=owner) == "eulav terces a"
    with pytest.raises(UserCodeError, match="KeyError"):
        await say(user, "secret")


async def test_errors_keep_their_kind_and_category(user: SandboxClient) -> None:
    with pytest.raises(UserCodeError, match="ValueError: as asked") as raised:
        await say(user, "raise")
    assert raised.value.category is FailureCategory.AGENT
    with pytest.raises(UserCodeError) as late:
        await say(user, "sleep", of=rollout(workflow_timeout_s=0.2))
    assert late.value.category is FailureCategory.TIMEOUT
    nowhere = rollout().entrypoint.model_copy(update={"path": "nowhere.py"})
    with pytest.raises(UserCodeError, match="does not hold") as missing:
        await say(user, "hello", of=rollout(entrypoint=nowhere))
    assert missing.value.category is FailureCategory.VALIDATION


async def test_a_snapshot_is_sent_once(user: SandboxClient, blobs: Blobs) -> None:
    await say(user, "one")
    await asyncio.gather(*(say(user, f"{n}", owner=SandboxOwner(f"r{n % 2}")) for n in range(8)))
    await user.discover(SNAPSHOT, ())
    assert blobs.num_read == 1


async def test_a_snapshot_that_cannot_be_read_raises_its_own_error(
    user: SandboxClient, blobs: Blobs
) -> None:
    blobs.error = StoreAway("the disk is full")
    with pytest.raises(StoreAway, match="the disk is full"):
        await say(user, "hello")
    blobs.error = None
    assert await say(user, "hello") == "hello"


async def test_a_snapshot_of_another_hash_is_refused(user: SandboxClient) -> None:
    other = rollout(snapshot=rollout().snapshot.model_copy(update={"sha256": "0" * 64}))
    with pytest.raises(CorruptData, match="other bytes"):
        await say(user, "hello", of=other)


async def test_a_large_prompt_holds_nothing_back(user: SandboxClient) -> None:
    large = "x" * (3 << 20)
    answers = await asyncio.gather(say(user, large), *(say(user, f"{n}") for n in range(20)))
    assert answers[0] == large
    assert answers[1:] == [f"{n}" for n in range(20)]


async def test_a_cancelled_call_leaves_the_others(user: SandboxClient) -> None:
    await say(user, "warm")
    task = asyncio.ensure_future(say(user, "sleep"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await say(user, "hello") == "hello"


async def test_a_killed_service_loses_no_work(child: SandboxClient) -> None:
    service = child._service
    assert isinstance(service, ChildService)
    assert await say(child, "hello") == "hello"
    first = service.pid
    assert first is not None
    calls = [asyncio.ensure_future(say(child, "sleep", of=rollout(commit=f"{n}"))) for n in "12"]
    await asyncio.sleep(0.3)
    os.kill(first, signal.SIGKILL)
    for call in calls:
        with pytest.raises(TransientError, match="lost"):
            await call
    assert await say(child, "hello") == "hello"
    assert service.pid != first


async def test_user_code_can_be_read_where_the_operator_has_a_strict_umask(
    child: SandboxClient,
) -> None:
    before = os.umask(0o077)
    try:
        assert await say(child, "hello") == "hello"
    finally:
        os.umask(before)


async def test_a_frozen_service_is_replaced(
    child: SandboxClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "BEAT_S", 0.05)
    monkeypatch.setattr(peer, "SILENCE_BEATS", 60)
    assert await say(child, "hello") == "hello"
    service = child._service
    assert isinstance(service, ChildService)
    first = service.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(TransientError, match="silent"):
        await say(child, "hello")
    monkeypatch.setattr(peer, "SILENCE_BEATS", 1000)
    assert await say(child, "hello") == "hello"
    assert service.pid != first
