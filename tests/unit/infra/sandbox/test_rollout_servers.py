"""Rollout servers run confined: their rollouts call the policy, and their grades come back."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import pytest

from infra.blobs.artifacts import reference
from infra.model_api.gateway.server import HttpGateway
from infra.ports.services import SandboxOwner, UserCodeRaised, UserOutput
from infra.sandbox.sandbox import LocalUserCode
from infra.sandbox.user_process import user_group
from schemas.artifact_refs import ArtifactRef
from schemas.errors import FailureCategory, TransientError, UserCodeError
from schemas.sampling import Grade, Message
from schemas.specs import Entrypoint, RolloutRef
from tests.kit.http_victim import Quick
from tests.kit.rollout_server import ENDS, SERVER
from tests.kit.specs import group_spec, template
from tests.kit.user_snapshots import snapshot_of

pytestmark = pytest.mark.processes


@dataclass
class Bench:
    """User code with a gateway, and the rollout to run."""

    user: LocalUserCode
    gateway: HttpGateway
    rollout: RolloutRef
    output: UserOutput | None = None

    async def run(self, what: str, *, index: int = 0, label: str | None = "yes") -> Grade:
        """The grade of one attempt in a session of its own."""
        session = self.gateway.open(group_spec(template()), index, deadline_s=60)
        try:
            made = await self.user.run_served(
                self.rollout,
                owner=SandboxOwner(run="r1"),
                sample=f"r1-{index}",
                prompt=[Message(role="user", content=what)],
                label=label,
                metadata={"more": 1},
                base_path=session.base_path,
                api_key=session.api_key,
            )
            self.output = made.output
            return made.grade
        finally:
            self.turns, _ = session.close()


async def _bench(level: str, env: Mapping[str, str], main: str) -> AsyncIterator[Bench]:
    snapshot = snapshot_of(main)

    async def fetch(ref: ArtifactRef) -> bytes:
        return snapshot

    rollout = RolloutRef(
        snapshot=reference(snapshot),
        commit="0" * 40,
        entrypoint=Entrypoint(rollout="say"),
        kind="server",
        workflow=None,
        grader=None,
        env=dict(env),
        workflow_timeout_s=30,
        grader_timeout_s=5,
    )
    gateway = HttpGateway(Quick(), group=user_group())
    await gateway.start()
    user = LocalUserCode(level, fetch=fetch, sockets=gateway)
    try:
        yield Bench(user, gateway, rollout)
    finally:
        await user.aclose()
        await gateway.aclose()


LEVEL = "bwrap"


@pytest.fixture
def level() -> str:
    return LEVEL


@pytest.fixture
def env() -> Mapping[str, str]:
    return {}


@pytest.fixture
def main() -> str:
    return SERVER


@pytest.fixture
async def bench(level: str, env: Mapping[str, str], main: str) -> AsyncIterator[Bench]:
    async for made in _bench(level, env, main):
        yield made


def generation(number: int) -> dict[str, str]:
    return {"GENERATION": str(number)}


@pytest.mark.parametrize(
    "level", [LEVEL, pytest.param("gvisor", marks=pytest.mark.gvisor), "process-trusted"]
)
async def test_an_attempt_calls_the_policy_and_its_grade_comes_back(bench: Bench) -> None:
    assert await bench.run("hello", label="her") == Grade(index=0, reward=2.0)
    assert len(bench.turns) == 1


@pytest.mark.parametrize(("env", "reward"), [(generation(1), 1.0), (generation(2), 2.0)])
async def test_older_generations_report_to_a_controller(bench: Bench, reward: float) -> None:
    assert (await bench.run("hello", label="her")).reward == reward, "the mean of its samples"
    failed = await failure(bench, "raise", index=1)
    assert failed.category is FailureCategory.AGENT
    assert failed.message == "the rollout server reports failure (agent_error): as asked"


async def failure(bench: Bench, what: str, *, index: int = 0) -> UserCodeError:
    with pytest.raises(UserCodeError) as raised:
        await bench.run(what, index=index)
    return raised.value


@pytest.mark.parametrize("level", [LEVEL, "process-trusted"])
async def test_a_program_has_its_folder_its_name_and_its_port(bench: Bench) -> None:
    assert (await bench.run("who", label="/rollouts/say say ")).reward == 2.0


async def test_a_sample_keeps_its_files_and_a_failed_one_what_was_printed(bench: Bench) -> None:
    await bench.run("who")
    assert bench.output is not None
    assert list(bench.output.files) == ["seen"]
    assert bench.output.stdout == ""
    with pytest.raises(UserCodeRaised) as raised:
        await bench.run("raise", index=1)
    assert raised.value.output is not None
    assert "most 1" in raised.value.output.stdout


async def test_samples_without_a_reward_say_why(bench: Bench) -> None:
    for what, why in (("no reward", "returned no reward"), ("removed", "removed this sample")):
        grade = await bench.run(what)
        assert grade.reward is None
        assert grade.failure is not None
        assert why in grade.failure.message
    raised = await failure(bench, "raise")
    assert raised.category is FailureCategory.AGENT
    assert "as asked" in raised.message


async def test_a_server_that_ends_fails_the_sample_that_ends_it_and_no_other(bench: Bench) -> None:
    async def settled(index: int, what: str) -> float | None:
        """As an effect does: again after an error that may pass."""
        for _ in range(6):
            try:
                return (await bench.run(what, index=index, label="her")).reward
            except TransientError as error:
                last = error
        raise last

    ends, *others = await asyncio.gather(
        settled(0, "exit"), *(settled(n, "wait") for n in (1, 2)), return_exceptions=True
    )
    assert others == [2.0, 2.0]
    assert isinstance(ends, UserCodeError)
    assert ends.category is FailureCategory.AGENT
    assert "exit code 3; its output ends: most 1\ngoing down" in ends.message


async def test_a_cancelled_attempt_is_cancelled_at_the_server(bench: Bench) -> None:
    task = asyncio.ensure_future(bench.run("sleep"))
    await bench.run("hello", index=1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (process,) = bench.user._warm.processes
    async with asyncio.timeout(10):
        while b"cancelled r1-0-" not in process.output:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("env", [{"LIMIT": "2"}])
async def test_a_server_gets_no_more_than_it_works_on(bench: Bench) -> None:
    rewards = await asyncio.gather(*(bench.run("wait", index=n, label="her") for n in range(5)))
    assert [grade.reward for grade in rewards] == [2.0] * 5
    (process,) = bench.user._warm.processes
    assert b"most 2" in process.output
    assert b"most 3" not in process.output


@pytest.mark.parametrize(("main", "why"), [(ENDS, "exit code 1; its output ends: no module")])
async def test_a_program_that_does_not_serve_says_why(bench: Bench, why: str) -> None:
    failed = await failure(bench, "hello")
    assert failed.category is FailureCategory.VALIDATION
    assert why in failed.message


async def test_a_server_is_recognised_without_running_it(bench: Bench) -> None:
    (found,) = await bench.user.discover(snapshot_of(SERVER + "\nraise SystemExit(1)"), ())
    assert (found.kind, found.error, found.workflow) == ("server", None, None)
    (found,) = await bench.user.discover(snapshot_of("x = 1"), ())
    assert found.kind == "classes"
