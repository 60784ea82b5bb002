"""The contract that user code keeps at every level: what its callers get of it."""

import asyncio
import io
import tarfile
from collections.abc import Mapping

import pytest

from infra.blobs.artifacts import reference
from infra.ports.services import SandboxOwner, UserCode, UserCodeRaised, UserOutput
from schemas.artifact_refs import ArtifactRef
from schemas.errors import FailureCategory, TransientError, UserCodeError
from schemas.sampling import Message, SampleRecord
from schemas.secrets.secret_value import SecretValue
from schemas.specs import Entrypoint, RewardSpec, RolloutRef, RubricSpec

MAIN = """
import asyncio, os, signal, time
import helper
from headrace import AgentWorkflow, Grader, reward, rubric

class Do(AgentWorkflow):
    async def run(self, ctx):
        what = ctx.prompt[0]["content"]
        if what == "raise":
            raise ValueError("as asked")
        if what == "sleep":
            await asyncio.sleep(3600)
        if what == "print and block":
            print("blocking")
        if "block" in what:
            time.sleep(3600)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "wait":
            await asyncio.sleep(0.3)
        if what == "nothing":
            return None
        if what == "leave":
            print("left", ctx.metadata["level"])
            os.write(1, bytes(3))
            (ctx.artifacts_dir / "a note").write_text("kept")
        if what == "leave and raise":
            print("left")
            (ctx.artifacts_dir / "note").write_text("kept")
            helper.fail()
        said = {
            "memory": lambda: helper.remember(),
            "environment": lambda: " ".join(f"{n}={v}" for n, v in sorted(os.environ.items())),
            "metadata": lambda: str(ctx.metadata),
            "threads": lambda: helper.threads(),
            "children": lambda: helper.child(),
            "disk": lambda: helper.disk(),
        }.get(what, lambda: what)()
        return [*ctx.prompt, {"role": "assistant", "content": said}]

class Check(Grader):
    async def grade(self, ctx):
        if ctx.label == "raise":
            raise KeyError("as asked")
        if ctx.label == "print":
            print("graded")
        for name, sample in ctx.samples.items():
            ctx.set_sample_reward(name, float(sample.text == ctx.label))

@reward
def length(solution_str, ground_truth, extra_info=None, **kwargs):
    return float(len(solution_str))

@rubric("Is it short?", model="openai/gpt-5-mini", scale=(1, 5))
def brief(solution_str, ground_truth, extra_info=None, **kwargs):
    return f"{solution_str} for {ground_truth}" if solution_str != "5" else None
"""
HELPER = """
import json, subprocess, sys, tempfile, threading

calls = 0

def fail():
    json.loads("{")

def remember():
    global calls
    calls += 1
    return str(calls)

def threads():
    found = []
    started = [threading.Thread(target=found.append, args=(n,)) for n in range(8)]
    for thread in started: thread.start()
    for thread in started: thread.join()
    return str(len(found))

def child():
    command = [sys.executable, "-c", "print(6 * 7)"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()

def disk():
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x" * 1000)
        return str(file.tell())
"""
TRIES = 6


def make_snapshot(files: Mapping[str, str]) -> bytes:
    """A tree as git's adapter delivers it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, text in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return out.getvalue()


SNAPSHOT = make_snapshot(
    {
        "rollouts/say/main.py": MAIN,
        "rollouts/say/helper.py": HELPER,
        "rollouts/bad/main.py": "import os\nos._exit(3)\n",
        "rollouts/wrong/main.py": "x = (\n",
    }
)
OWNER = SandboxOwner(run="run-1")
SAMPLES = [SampleRecord(index=0, text="4"), SampleRecord(index=1, text="5")]


async def fetch_snapshot(ref: ArtifactRef) -> bytes:
    """What an implementation reads the snapshot with."""
    assert ref.sha256 == reference(SNAPSHOT).sha256
    return SNAPSHOT


def rollout_of(**values: object) -> RolloutRef:
    """The rollout of the contract, with other values."""
    return RolloutRef(
        snapshot=reference(SNAPSHOT),
        commit="0" * 40,
        entrypoint=Entrypoint(rollout="say"),
        workflow="Do",
        grader="Check",
        workflow_timeout_s=1.0,
        grader_timeout_s=5.0,
    ).model_copy(update=values)


async def say(
    user: UserCode, what: str, *, rollout: RolloutRef | None = None, owner: SandboxOwner = OWNER
) -> str | None:
    """Run the workflow once. Returns its last message."""
    result = await user.run_workflow(
        rollout or rollout_of(),
        owner=owner,
        sample=f"sample-{what}",
        prompt=[Message(role="user", content=what)],
        metadata={"level": 3},
        base_path="/v1/samples/one",
        api_key="key",
    )
    return result.messages[-1].content if result.messages is not None else None


async def settle(user: UserCode, what: str) -> str | None:
    """Run the workflow as an effect does: again after an error that may pass."""
    for _ in range(TRIES):
        try:
            return await say(user, what)
        except TransientError:
            continue
        except UserCodeError as error:
            return error.category
    raise AssertionError(f"{what} did not settle")


class UserCodeSuite:
    """The contract. A class of a level gives the fixture `user`."""

    async def test_discovery_names_what_each_entry_point_defines(self, user: UserCode) -> None:
        found = {each.entrypoint.rollout: each for each in await user.discover(SNAPSHOT, [])}
        assert set(found) == {"say", "bad", "wrong"}
        good = found["say"]
        assert (good.workflow, good.grader, good.rewards, good.error) == (
            "Do",
            "Check",
            ("length",),
            None,
        )
        [brief] = good.rubrics
        assert (brief.name, brief.text, brief.low, brief.high) == ("brief", "Is it short?", 1, 5)
        assert "main.py:1: SyntaxError" in (found["wrong"].error or "")
        assert found["bad"].error is not None

    async def test_a_workflow_returns_its_conversation(self, user: UserCode) -> None:
        assert await say(user, "hello") == "hello"
        assert await say(user, "nothing") is None
        assert await say(user, "metadata") == "{'level': 3}"

    @pytest.mark.parametrize(
        ("what", "answer"), [("threads", "8"), ("children", "42"), ("disk", "1000")]
    )
    async def test_ordinary_programs_run(self, user: UserCode, what: str, answer: str) -> None:
        assert await say(user, what, rollout=rollout_of(workflow_timeout_s=20.0)) == answer

    @pytest.mark.parametrize(
        ("what", "category"),
        [
            ("raise", FailureCategory.AGENT),
            ("sleep", FailureCategory.TIMEOUT),
            ("block", FailureCategory.TIMEOUT),
            ("die", FailureCategory.AGENT),
        ],
    )
    async def test_a_sample_fails_alone(
        self, user: UserCode, what: str, category: FailureCategory
    ) -> None:
        failed, good = await asyncio.gather(settle(user, what), settle(user, "wait"))
        assert (failed, good) == (category, "wait")

    async def test_a_process_is_of_one_run_and_role(self, user: UserCode) -> None:
        other = SandboxOwner(run="run-2")
        said = [await say(user, "memory", owner=owner) for owner in (OWNER, OWNER, other)]
        assert said == ["1", "2", "1"]

    async def test_variables_are_those_of_the_rollout_and_its_secrets(self, user: UserCode) -> None:
        owner = SandboxOwner(run="run-1", secrets={"KEY": SecretValue("a b=c\nd")})
        said = await say(
            user, "environment", rollout=rollout_of(env={"COLOUR": "blue"}), owner=owner
        )
        assert said is not None
        assert "COLOUR=blue" in said
        assert "KEY=a b=c\nd" in said
        assert "HOME=/tmp" in said
        assert "HEADRACE" not in said
        assert "KEY=" not in (await say(user, "environment") or "")

    async def test_the_output_of_an_attempt_is_returned(self, user: UserCode) -> None:
        async def left(what: str) -> UserOutput | None:
            try:
                result = await user.run_workflow(
                    rollout_of(),
                    owner=OWNER,
                    sample=f"sample-{what}",
                    prompt=[Message(role="user", content=what)],
                    metadata={"level": 3},
                    base_path="/v1/samples/one",
                    api_key="key",
                )
            except UserCodeRaised as error:
                return error.output
            return result.output

        nothing, output, raised = await asyncio.gather(
            *map(left, ("hi", "leave", "leave and raise"))
        )
        assert nothing is None
        assert output == UserOutput(stdout="left 3\n", files={"a_note": b"kept"})
        assert raised is not None
        assert (raised.stdout, dict(raised.files)) == ("left\n", {"note": b"kept"})
        assert raised.traceback is not None
        lines = [line.strip() for line in raised.traceback.splitlines()]
        assert [line.split(", line")[0] for line in lines if line.startswith("File")] == [
            'File "rollouts/say/main.py"',
            'File "rollouts/say/helper.py"',
        ]

    async def test_code_that_blocks_its_process_leaves_the_place(self, user: UserCode) -> None:
        with pytest.raises(UserCodeRaised, match="blocked its process") as raised:
            await say(user, "print and block")
        output = raised.value.output
        assert output is not None
        assert (output.stdout, raised.value.category) == ("blocking\n", FailureCategory.TIMEOUT)
        assert "rollouts/say/main.py" in (output.traceback or "")
        assert "time.sleep(3600)" in (output.traceback or "")
        assert "headrace/" not in (output.traceback or "")

    async def test_the_output_of_a_grader_is_returned(self, user: UserCode) -> None:
        result = await user.grade(
            rollout_of(), owner=OWNER, group="g", label="print", metadata={}, samples=SAMPLES
        )
        assert result.output == UserOutput(stdout="graded\n")
        with pytest.raises(UserCodeRaised) as raised:
            await user.grade(
                rollout_of(), owner=OWNER, group="g", label="raise", metadata={}, samples=SAMPLES
            )
        assert raised.value.output is not None
        assert "KeyError: 'as asked'" in (raised.value.output.traceback or "")

    async def test_samples_are_graded_in_their_order(self, user: UserCode) -> None:
        graded = (
            await user.grade(
                rollout_of(), owner=OWNER, group="g", label="4", metadata={}, samples=SAMPLES
            )
        ).grades
        assert [(grade.index, grade.reward) for grade in graded] == [(0, 1.0), (1, 0.0)]
        weighted = rollout_of(grader=None, rewards=(RewardSpec(name="length", weight=2.0),))
        graded = (
            await user.grade(
                weighted, owner=OWNER, group="g", label="4", metadata={}, samples=SAMPLES
            )
        ).grades
        assert [grade.reward for grade in graded] == [2.0, 2.0]
        assert [dict(grade.parts) for grade in graded] == [{"length": 1.0}, {"length": 1.0}]

    async def test_rubrics_say_what_their_judges_read(self, user: UserCode) -> None:
        brief = RubricSpec(name="brief", text="Is it short?", model="openai/m", asks=True)
        both = rollout_of(grader="Check", rubrics=(brief,))
        alone = rollout_of(grader=None, rubrics=(brief,))
        for rollout, rewards in ((both, [1.0, 0.0]), (alone, [0.0, 0.0])):
            graded = (
                await user.grade(
                    rollout, owner=OWNER, group="g", label="4", metadata={}, samples=SAMPLES
                )
            ).grades
            assert [grade.reward for grade in graded] == rewards
            assert [dict(grade.questions) for grade in graded] == [{"brief": "4 for 4"}, {}]

    async def test_a_grader_that_raises_says_where(self, user: UserCode) -> None:
        with pytest.raises(UserCodeError, match=r"main.py:\d+ in grade: KeyError") as raised:
            await user.grade(
                rollout_of(), owner=OWNER, group="g", label="raise", metadata={}, samples=SAMPLES
            )
        assert raised.value.category == FailureCategory.GRADER

    async def test_an_entry_point_that_is_not_there_is_named(self, user: UserCode) -> None:
        gone = rollout_of(entrypoint=Entrypoint(rollout="say", path="gone.py"))
        with pytest.raises(UserCodeError, match=r"gone\.py"):
            await say(user, "hello", rollout=gone)

    async def test_code_ends_within_seconds(self, user: UserCode) -> None:
        """Also code that runs. A second end changes nothing."""
        patient = rollout_of(workflow_timeout_s=99.0)
        assert await say(user, "hello", rollout=patient) == "hello"
        calling = asyncio.ensure_future(say(user, "sleep", rollout=patient))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(20):
            await user.aclose()
            with pytest.raises(TransientError):
                await calling
