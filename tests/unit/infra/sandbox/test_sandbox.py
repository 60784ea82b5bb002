"""Confined processes: user code affects only its own sample, and can reach nothing of the
platform."""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from infra.ports.services import SandboxOwner
from infra.sandbox import sandbox
from infra.sandbox.host_messages import FirstMessage
from infra.sandbox.levels.bubblewrap_options import USER
from infra.sandbox.levels.level import Level
from infra.sandbox.process import KEPT_OUTPUT, ConfinedProcess, ProcessEnded
from infra.sandbox.sandbox import LocalUserCode
from infra.sandbox.user_process import UNPRIVILEGED
from schemas.errors import FailureCategory, TransientError, UserCodeError
from schemas.sampling import Grade, Message, SampleFailure, SampleRecord
from schemas.specs import RewardSpec, RolloutRef
from tests.kit.sandboxed_code import SNAPSHOT, store_rollout

pytestmark = pytest.mark.processes

OWNER = SandboxOwner(run="run-1")
LEVEL = "bwrap"

MAIN = """
import asyncio, os, pathlib, signal, sys, time
from headrace import AgentWorkflow, Grader, reward


def killed(when):
    # By somebody, as often as a file says.
    left = pathlib.Path(os.environ.get("DEATHS", "/none"), when)
    if left.exists() and (times := int(left.read_text())):
        left.write_text(str(times - 1))
        os.kill(os.getpid(), signal.SIGKILL)


killed("loading")
if note := os.environ.get("NOTE"):
    pathlib.Path(note).write_text(str(os.getpid()))
    time.sleep(3600)


class Do(AgentWorkflow):
    async def run(self, ctx):
        what = ctx.prompt[0]["content"]
        killed("running")
        if what == "raise":
            raise ValueError("as asked")
        if what == "block":
            while True:
                time.sleep(0.01)
        if what == "sleep":
            await asyncio.sleep(3600)
        if what == "exit":
            os._exit(3)
        if what == "print":
            for _ in range(64):
                sys.stdout.write("x" * (1 << 20))
        if what == "odd":
            return "no list"
        if what == "who":
            return [{"role": "assistant", "content": f"{os.getuid()} {sorted(os.environ)}"}]
        if what.startswith("read "):
            return [{"role": "assistant", "content": pathlib.Path(what[5:]).read_text()}]
        if what == "context":
            return [{"role": "assistant", "content": str(vars(ctx))}]
        if what == "wait":
            await asyncio.sleep(0.5)
        if what.startswith("keep"):
            kept = ctx.artifacts_dir / "kept"
            found = sorted(os.listdir(ctx.artifacts_dir))
            kept.write_text(what)
            assert ctx.artifacts_dir == kept.parent
            if what == "keep and fail":
                raise ValueError(str(kept.parent))
            return [{"role": "assistant", "content": f"{kept.parent} {found}"}]
        return [{"role": "assistant", "content": "done"}]


class Check(Grader):
    async def grade(self, ctx):
        if ctx.label == "never":
            await asyncio.sleep(3600)
        if ctx.label == "raise":
            raise KeyError("as asked")
        values = {"nan": float("nan"), "text": "high", "none": None, "true": True}
        for name, sample in ctx.samples.items():
            if ctx.label == "branches":
                spoken = [[message["content"] for message in one] for one in sample.branches]
                values = {"branches": float(spoken == [["a", "b"], ["a", "c"]][: len(spoken)])}
                values["branches"] += len(spoken)
            if ctx.label == "ends":
                failure = [None, "agent_error", "timeout"].index(sample.failure)
                values = {"ends": 10.0 * failure + sample.truncated}
            ctx.set_sample_reward(name, values.get(ctx.label, 0.5))


@reward
def length(solution_str, ground_truth, extra_info=None, **kwargs):
    return float(len(solution_str))


@reward
def picky(solution_str, ground_truth, extra_info=None, **kwargs):
    return 1 / (len(solution_str) - 2)


@reward
def huge(solution_str, ground_truth, extra_info=None, **kwargs):
    return 10**400


@reward
async def broken(solution_str, ground_truth, extra_info=None, **kwargs):
    return float("inf")
"""


@pytest.fixture
async def rollout(tmp_path: Path) -> RolloutRef:
    return await store_rollout(tmp_path, {"rollouts/say/main.py": MAIN}, env={"COLOUR": "blue"})


async def run(
    user: LocalUserCode, rollout: RolloutRef, what: str, *, sample: str | None = None
) -> str:
    result = await user.run_workflow(
        rollout,
        owner=OWNER,
        sample=sample or what,
        prompt=[Message(role="user", content=what)],
        metadata={},
        base_path="/v1/samples/one",
        api_key="key",
    )
    assert result.messages is not None
    return result.messages[-1].content


async def failure(user: LocalUserCode, rollout: RolloutRef, what: str) -> UserCodeError:
    """The failure of a sample, which is retried (as its effect would be) when the fault may not be
    its own."""
    for _ in range(sandbox.TRIES + 1):
        try:
            await run(user, rollout, what)
        except TransientError:
            continue
        except UserCodeError as error:
            return error
    raise AssertionError(f"{what} did not fail")


@pytest.mark.parametrize(
    ("what", "category", "says"),
    [
        ("raise", FailureCategory.AGENT, "ValueError: as asked"),
        ("sleep", FailureCategory.TIMEOUT, "1 s"),
        ("block", FailureCategory.TIMEOUT, "1 s"),
        ("exit", FailureCategory.AGENT, "alone"),
        ("odd", FailureCategory.AGENT, "list of messages"),
    ],
)
async def test_a_sample_fails_alone_and_says_how(
    user: LocalUserCode, rollout: RolloutRef, what: str, category: FailureCategory, says: str
) -> None:
    error = await failure(user, rollout, what)
    assert error.category == category
    assert says in error.message
    assert await run(user, rollout, "fine") == "done", "the next one has a process"


async def until_known(user: LocalUserCode, rollout: RolloutRef, what: str) -> str:
    """The answer of a sample, or its failure; the sample is retried as its effect would be."""
    for _ in range(sandbox.TRIES + 1):
        try:
            return await run(user, rollout, what)
        except TransientError:
            continue
        except UserCodeError as error:
            return str(error.category)
    raise AssertionError("never known")


async def test_neighbours_of_one_that_ends_the_process_run_again(
    user: LocalUserCode, rollout: RolloutRef
) -> None:
    await run(user, rollout, "warm")
    names = ["wait", "exit", "wait "]
    ended = await asyncio.gather(*(until_known(user, rollout, name) for name in names))
    assert ended == ["done", "agent_error", "done"]


@pytest.mark.parametrize(
    ("when", "times", "ends"),
    [
        ("loading", sandbox.TRIES - 1, "done"),
        ("loading", sandbox.TRIES, "process_died"),
        ("running", sandbox.TRIES, "done"),  # once beside others, then alone
        ("running", sandbox.TRIES + 1, "agent_error"),
    ],
)
async def test_a_process_that_is_killed_is_not_the_samples_fault(
    trusted: LocalUserCode, rollout: RolloutRef, when: str, times: int, ends: str
) -> None:
    with tempfile.TemporaryDirectory() as deaths:
        Path(deaths).chmod(0o755)  # user code's user reads it, and writes to the file
        file = Path(deaths, when)
        file.write_text(str(times))
        file.chmod(0o666)
        mortal = rollout.model_copy(update={"env": {"DEATHS": deaths}})
        assert await until_known(trusted, mortal, "fine") == ends
        assert file.read_text() == "0"


async def test_an_attempt_whose_process_was_killed_is_never_gone_on_with(
    trusted: LocalUserCode, rollout: RolloutRef
) -> None:
    """Each call runs the sample once: the requests of a killed attempt to the policy stay its
    own."""
    with tempfile.TemporaryDirectory() as deaths:
        Path(deaths).chmod(0o755)
        file = Path(deaths, "running")
        file.write_text("2")
        file.chmod(0o666)
        mortal = rollout.model_copy(update={"env": {"DEATHS": deaths}})
        for left in ("1", "0"):
            with pytest.raises(TransientError, match="runs again, alone"):
                await run(trusted, mortal, "fine")
            assert file.read_text() == left
        assert await run(trusted, mortal, "fine") == "done"


async def test_a_caller_that_gives_up_while_it_loads_leaves_no_process(
    trusted: LocalUserCode, rollout: RolloutRef
) -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        note = Path(place, "pid")
        note.touch()
        note.chmod(0o666)
        slow = rollout.model_copy(update={"env": {"NOTE": str(note)}})
        caller = asyncio.ensure_future(run(trusted, slow, "fine"))
        async with asyncio.timeout(60):
            while not note.read_text():
                await asyncio.sleep(0.01)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert not Path("/proc", note.read_text()).exists()


async def test_discovery_begins_again_when_its_process_was_killed(
    user: LocalUserCode, rollout: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, deaths = ConfinedProcess.start, 2

    async def killed_first(process: ConfinedProcess) -> FirstMessage:
        nonlocal deaths
        if deaths:
            deaths -= 1
            raise ProcessEnded("killed")
        return await start(process)

    monkeypatch.setattr(ConfinedProcess, "start", killed_first)
    (found,) = await user.discover(SNAPSHOT[-1], [rollout.entrypoint])
    assert (found.error, found.workflow, deaths) == (None, "Do", 0)


async def test_a_flood_of_output_is_dropped(user: LocalUserCode, rollout: RolloutRef) -> None:
    patient = rollout.model_copy(update={"workflow_timeout_s": 30})
    assert await run(user, patient, "print") == "done"


async def test_only_the_first_bytes_of_the_output_are_kept() -> None:
    nowhere = Path("/nowhere")
    process = ConfinedProcess(
        "workflow",
        level=cast("Level", None),
        sdk=nowhere,
        tree=nowhere,
        entrypoint=nowhere,
        env={},
    )
    printed = asyncio.StreamReader()
    for letter in (b"a", b"b", b"c"):
        printed.feed_data(letter * (KEPT_OUTPUT // 2 + 1))
    printed.feed_eof()
    await process._drain(printed)
    assert len(process.output) == KEPT_OUTPUT
    assert process.output.startswith(b"a")
    assert process.output.endswith(b"b")


async def test_user_code_runs_as_its_own_user_and_sees_no_secrets(
    user: LocalUserCode, rollout: RolloutRef, tmp_path: Path
) -> None:
    uid, _, names = (await run(user, rollout, "who")).partition(" ")
    assert "COLOUR" in names
    assert "HEADRACE" not in names
    assert int(uid) == USER
    secret = tmp_path / "home" / "token"
    secret.write_text("secret")
    error = await failure(user, rollout, f"read {secret}")
    assert "FileNotFoundError" in error.message


async def test_a_trusted_process_has_a_user_of_its_own_if_we_are_root(
    trusted: LocalUserCode, rollout: RolloutRef, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give user code a user of its own")
    uid, _, _ = (await run(trusted, rollout, "who")).partition(" ")
    assert int(uid) == UNPRIVILEGED
    secret = tmp_path / "token"
    secret.write_text("secret")
    secret.chmod(0o600)
    error = await failure(trusted, rollout, f"read {secret}")
    assert "PermissionError" in error.message


async def test_code_that_a_push_brought_is_not_trusted(
    user: LocalUserCode, trusted: LocalUserCode, rollout: RolloutRef
) -> None:
    pushed = rollout.model_copy(update={"pushed": True})
    error = await failure(trusted, pushed, "fine")
    assert "HEADRACE_SANDBOX is process-trusted" in error.message
    assert await run(user, pushed, "fine") == "done"
    assert await run(trusted, rollout, "fine") == "done", "a person's code is trusted there"


async def test_an_attempt_has_a_directory_of_its_own_until_it_is_over(
    user: LocalUserCode, rollout: RolloutRef
) -> None:
    said = await asyncio.gather(*(run(user, rollout, f"keep {i}") for i in range(3)))
    places = [Path(each.split()[0]) for each in said]
    assert len(set(places)) == 3
    assert all(each.endswith(" []") for each in said), "each found its own empty"
    failed = await failure(user, rollout, "keep and fail")
    places.append(Path(failed.message.rpartition("ValueError: ")[2]))
    assert [str(place.parent) for place in places] == ["/tmp"] * 4
    assert not any(place.exists() for place in places)


async def test_the_label_never_enters_the_workflows_process(
    user: LocalUserCode, rollout: RolloutRef
) -> None:
    assert "label" not in await run(user, rollout, "context")
    parameters = LocalUserCode.run_workflow.__annotations__
    assert "label" not in parameters


async def grades(user: LocalUserCode, rollout: RolloutRef, label: str) -> Sequence[object]:
    return (
        await user.grade(
            rollout,
            owner=OWNER,
            group="g",
            label=label,
            metadata={},
            samples=[SampleRecord(index=0, text="abc"), SampleRecord(index=2, text="de")],
        )
    ).grades


async def test_grades_are_numbers_or_say_why_not(user: LocalUserCode, rollout: RolloutRef) -> None:
    good = (
        await user.grade(
            rollout,
            owner=OWNER,
            group="g",
            label="x",
            metadata={},
            samples=[SampleRecord(index=3, text="a")],
        )
    ).grades
    assert [(grade.index, grade.reward) for grade in good] == [(3, 0.5)]
    for label, says in (("nan", "finite"), ("text", "str 'high'"), ("none", "no reward")):
        (first, _) = (
            await user.grade(
                rollout,
                owner=OWNER,
                group="g",
                label=label,
                metadata={},
                samples=[SampleRecord(index=0), SampleRecord(index=1)],
            )
        ).grades
        assert first.reward is None
        assert first.failure is not None
        assert says in first.failure.message


async def test_a_grader_sees_every_branch(user: LocalUserCode, rollout: RolloutRef) -> None:
    asked = Message(role="user", content="a")
    one, other = ((asked, Message(role="assistant", content=text)) for text in "bc")
    graded = await user.grade(
        rollout,
        owner=OWNER,
        group="g",
        label="branches",
        metadata={},
        samples=[
            SampleRecord(index=0, messages=one),
            SampleRecord(index=1, messages=other, branches=(one, other)),
        ],
    )
    assert [grade.reward for grade in graded.grades] == [2.0, 3.0]


async def test_a_grader_sees_how_an_attempt_ended(user: LocalUserCode, rollout: RolloutRef) -> None:
    late = SampleFailure(category=FailureCategory.TIMEOUT, message="why")
    ends = [SampleRecord(index=0, truncated=True), SampleRecord(index=1, failure=late)]
    graded = await user.grade(
        rollout, owner=OWNER, group="g", label="ends", metadata={}, samples=ends
    )
    assert [grade.reward for grade in graded.grades] == [1.0, 20.0]


@pytest.mark.parametrize(
    ("label", "category"),
    [("never", FailureCategory.TIMEOUT), ("raise", FailureCategory.GRADER)],
)
async def test_a_grader_that_fails_as_a_whole_is_refused_with_its_category(
    user: LocalUserCode, rollout: RolloutRef, label: str, category: FailureCategory
) -> None:
    with pytest.raises(UserCodeError) as raised:
        await grades(user, rollout, label)
    assert raised.value.category == category


async def test_reward_functions_are_weighed(user: LocalUserCode, rollout: RolloutRef) -> None:
    weighed = rollout.model_copy(update={"rewards": (RewardSpec(name="length", weight=0.5),)})
    found = (
        await user.grade(
            weighed,
            owner=OWNER,
            group="g",
            label="x",
            metadata={},
            samples=[SampleRecord(index=0, text="abcd")],
        )
    ).grades
    assert (found[0].reward, found[0].parts) == (2.0, {"length": 4.0})
    spoiled = rollout.model_copy(
        update={"rewards": (RewardSpec(name="length"), RewardSpec(name="broken"))}
    )
    (grade,) = (
        await user.grade(
            spoiled,
            owner=OWNER,
            group="g",
            label="x",
            metadata={},
            samples=[SampleRecord(index=0, text="abcd")],
        )
    ).grades
    assert grade.reward is None
    assert grade.failure is not None
    assert "broken" in grade.failure.message


async def test_a_reward_that_raises_fails_its_own_sample(
    user: LocalUserCode, rollout: RolloutRef
) -> None:
    for name, category, says in (
        ("picky", FailureCategory.GRADER, "in picky: ZeroDivisionError"),
        ("huge", FailureCategory.VALIDATION, "@reward huge returned 1000"),
    ):
        weighed = rollout.model_copy(update={"rewards": (RewardSpec(name=name),)})
        first, second = await grades(user, weighed, "x")
        assert isinstance(second, Grade)
        assert second.failure is not None
        assert second.failure.category == category
        assert says in second.failure.message
        assert isinstance(first, Grade)
        assert (first.failure is None) == (name == "picky"), "its neighbour keeps its reward"


async def test_processes_stay_warm(user: LocalUserCode, rollout: RolloutRef) -> None:
    await run(user, rollout, "first")
    (process,) = user._warm.processes
    for number in range(20):
        await run(user, rollout, f"again {number}")
    assert list(user._warm.processes) == [process]
    assert process.alive


async def test_of_warm_processes_the_one_unused_for_longest_ends_first(
    user: LocalUserCode, rollout: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user._warm, "_most", 2)
    kinds = [rollout.model_copy(update={"env": {"KIND": kind}}) for kind in "abc"]
    for kind in (kinds[0], kinds[1], kinds[0]):
        await run(user, kind, "fine")
    first, second = user._warm.processes
    await run(user, kinds[2], "fine")
    assert (first.alive, second.alive) == (True, False)
    assert len(user._warm.processes) == 2


async def test_of_twelve_runs_at_once_no_call_is_repeated(
    user: LocalUserCode, rollout: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user._warm, "_most", 4)
    runs = [rollout.model_copy(update={"env": {"KIND": str(n)}}) for n in range(12)]
    calls = [run(user, one, "wait", sample=f"sample {n}") for n in range(4) for one in runs]
    assert len(await asyncio.gather(*calls)) == 48, "a call whose process was ended raises"
    assert len(user._warm.processes) <= 4
