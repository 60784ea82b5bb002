"""User code attacks the process that it runs in, its pipe, or its neighbours; only its own sample
fails."""

import asyncio
import json
import math
import os
import signal
from pathlib import Path

import pytest

from consumers.user_code import interrupted_calls
from infra.ports.services import SandboxOwner
from infra.repositories.git.mirrors import GitRepositories
from infra.sandbox import calls, sandbox
from infra.sandbox import process as confined
from infra.sandbox.host_messages import Graded, ProtocolError, check_grades, parse_later
from infra.sandbox.sandbox import LocalUserCode
from infra.settings.git import LAPTOP
from schemas.errors import FailureCategory, TransientError, UserCodeError
from schemas.sampling import Message, SampleRecord
from schemas.specs import CommitSpec, RolloutRef
from tests.kit.platform import make_workspace
from tests.kit.sandboxed_code import SNAPSHOT, fetch, store_rollout

pytestmark = pytest.mark.processes

OWNER = SandboxOwner(run="run-1")
LEVEL = "bwrap"

MAIN = """
import asyncio, ctypes, json, os, resource, signal, struct, sys, time
from headrace import AgentWorkflow, Grader, reward

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
TRACEME, SEIZE, GET_DUMPABLE = 0, 0x4206, 3


def say(data):
    os.write(int(sys.argv[3]), data)


def framed(data):
    return struct.pack(">I", len(data)) + data


def seize(pid):
    # By a process of a session of its own, which never waits for what it traces.
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.write(writing, b"%d" % (libc.ptrace(SEIZE, pid, None, None) == 0))
        time.sleep(600)
        os._exit(0)
    return os.read(reading, 1) == b"1"


class Do(AgentWorkflow):
    async def run(self, ctx):
        what = ctx.prompt[0]["content"]
        if what == "traceme":
            libc.ptrace(TRACEME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "seized":
            return [{"role": "assistant", "content": str(seize(os.getpid()))}]
        if what == "limits":
            status = dict(line.split(":", 1) for line in open("/proc/self/status"))
            said = [status["NoNewPrivs"].strip(), libc.prctl(GET_DUMPABLE), "HOME=" + os.environ["HOME"]]
            return [{"role": "assistant", "content": " ".join(map(str, said))}]
        if what == "sizes":
            names = ("RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NPROC")
            sizes = [resource.getrlimit(getattr(resource, name))[0] for name in names]
            places = {os.stat(place).st_dev: os.statvfs(place) for place in ("/tmp", "/dev/shm")}
            sizes.append(sum(place.f_blocks * place.f_frsize for place in places.values()))
            return [{"role": "assistant", "content": " ".join(map(str, sizes))}]
        if what == "surrogate":
            return [{"role": "assistant", "content": "\\ud800"}]
        if what.startswith("say "):
            say(eval(what[4:]))
            await asyncio.sleep(5)
        return [{"role": "assistant", "content": "done"}]


class Check(Grader):
    async def grade(self, ctx):
        if ctx.label:
            grades = eval(ctx.label)
            say(framed(json.dumps({"id": "g", "grades": grades}).encode()))
            await asyncio.sleep(5)


@reward
def exact(solution_str, ground_truth, extra_info=None, **kwargs):
    return 1.0
"""

FIVE = 'import os, struct, sys\nos.write(int(sys.argv[3]), struct.pack(">I", 1) + b"5")\n'


@pytest.fixture
async def rollout(tmp_path: Path) -> RolloutRef:
    files = {"rollouts/say/main.py": MAIN, "rollouts/five/main.py": FIVE}
    return await store_rollout(tmp_path, files)


async def run(user: LocalUserCode, rollout: RolloutRef, what: str) -> str:
    result = await user.run_workflow(
        rollout,
        owner=OWNER,
        sample=what[:40],
        prompt=[Message(role="user", content=what)],
        metadata={},
        base_path="/v1/samples/one",
        api_key="key",
    )
    assert result.messages is not None
    return result.messages[-1].content


async def failure(user: LocalUserCode, rollout: RolloutRef, what: str) -> UserCodeError:
    """The final failure of a sample, which is retried as its effect would be, within a time that
    only a hang exceeds."""
    async with asyncio.timeout(120):
        for _ in range(sandbox.TRIES + 1):
            try:
                await run(user, rollout, what)
            except TransientError:
                continue
            except UserCodeError as error:
                return error
    raise AssertionError(f"{what} did not fail")


def patch_sdk(user: LocalUserCode, file: str, old: str) -> None:
    """Remove a line from the SDK code that runs in the process of user code."""
    path = user._sdk / "headrace" / "user_code" / file
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, ""))


@pytest.mark.parametrize("what", ["traceme", "stop"])
async def test_a_process_that_stops_itself_ends_and_its_neighbours_go_on(
    user: LocalUserCode, rollout: RolloutRef, what: str
) -> None:
    error = await failure(user, rollout, what)
    assert error.category == FailureCategory.TIMEOUT
    assert await run(user, rollout, "fine") == "done"


async def test_nobody_may_trace_a_process_of_user_code(
    user: LocalUserCode, rollout: RolloutRef
) -> None:
    assert await run(user, rollout, "seized") == "False"


async def test_twin_a_process_that_may_be_traced_ends_with_its_tracer(
    trusted: LocalUserCode, rollout: RolloutRef
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only as root user code has a user of its own, whose processes may be killed")
    patch_sdk(trusted, "user_code_host.py", "    hide()\n")
    assert await run(trusted, rollout, "seized") == "True"
    (process,) = trusted._warm.processes
    async with asyncio.timeout(60):
        await process.aclose()
    assert await run(trusted, rollout, "fine") == "done"


async def test_limits_hold_in_user_code(user: LocalUserCode, rollout: RolloutRef) -> None:
    assert await run(user, rollout, "limits") == "1 0 HOME=/tmp"


async def test_the_operator_sets_the_limits(
    rollout: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twin: without the variable, the limits are the defaults. The last size is that of all places to
    write: shared memory has one of its own where the tests' files lie in it."""
    gib = 1 << 30

    for chosen, expected in (
        ("memory=3,disk=4,processes=99", [3 * gib, 2 * gib, 99, 4 * gib]),
        ("", [16 * gib, gib, 1024, 2 * gib]),
    ):
        monkeypatch.setenv("HEADRACE_SANDBOX_LIMITS", chosen)
        made = LocalUserCode(LEVEL, fetch=fetch)
        sizes = [int(size) for size in (await run(made, rollout, "sizes")).split()]
        await made.aclose()
        assert sizes == expected


async def test_twin_the_launcher_is_who_sets_them(
    trusted: LocalUserCode, rollout: RolloutRef
) -> None:
    patch_sdk(trusted, "launch.py", "    confine()\n")
    patch_sdk(trusted, "user_code_host.py", "    hide()\n")
    assert await run(trusted, rollout, "limits") == "0 1 HOME=/tmp"


async def test_nothing_of_the_users_comes_before_the_limits(
    user: LocalUserCode, rollout: RolloutRef
) -> None:
    """A program in the host's place reports its limits at its first byte; the launcher saw no
    variable."""
    (user._sdk / "headrace" / "user_code" / "user_code_host.py").write_text(
        "import os, struct, sys\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "said = status['NoNewPrivs'].strip() + os.environ['COLOUR']\n"
        "said += str('HEADRACE_ENV_COLOUR' in os.environ)\n"
        'data = b\'{"unusable": "%s"}\' % said.encode()\n'
        "os.write(int(sys.argv[3]), struct.pack('>I', len(data)) + data)\n"
    )
    coloured = rollout.model_copy(update={"env": {"COLOUR": "blue"}})
    error = await failure(user, coloured, "fine")
    assert error.message == "1blueFalse"


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "GLIBC_TUNABLES", "PATH", "HOME", "PYTHONSTARTUP", "HEADRACE_HOME"]
)
async def test_variables_of_the_loader_are_refused(
    user: LocalUserCode, rollout: RolloutRef, name: str
) -> None:
    """They are refused at submit too; this check is for values that were recorded before."""
    error = await failure(user, rollout.model_copy(update={"env": {name: "x"}}), "fine")
    assert error.category == FailureCategory.VALIDATION
    assert name in error.message


@pytest.mark.parametrize(
    "what",
    [
        'framed(b"5")',
        'b"\\xff\\xff\\xff\\xff"',
        'framed(b\'{"id": "nobody", "messages": null}\') * 1000',
    ],
)
async def test_output_that_is_not_a_message_fails_its_sample(
    user: LocalUserCode, rollout: RolloutRef, what: str
) -> None:
    error = await failure(user, rollout, f"say {what}")
    assert error.category == FailureCategory.AGENT
    assert "a pipe that is not its own" in error.message
    assert await run(user, rollout, "fine") == "done"


async def test_a_rollout_that_says_five_fails_alone(
    user: LocalUserCode, rollout: RolloutRef
) -> None:
    five, good = await user.discover(SNAPSHOT[-1], [])
    assert five.entrypoint.rollout == "five"
    assert "a pipe that is not its own" in (five.error or "")
    assert (good.workflow, good.error) == ("Do", None)


HIDDEN = """
from headrace import AgentWorkflow, reward, rubric

class Do(AgentWorkflow):
    async def run(self, ctx):
        return None

def score(solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    return 1.0

"""


async def test_one_worker_makes_enough_attempts_to_find_who_ends_the_process(
    user: LocalUserCode, rollout: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the effect would fail for a reason of the platform, which the figures leave out."""
    monkeypatch.setattr(interrupted_calls, "PAUSES_S", [0.0] * len(interrupted_calls.PAUSES_S))
    with pytest.raises(UserCodeError, match=r"whenever .* ran alone in it") as raised:
        await interrupted_calls.until_uninterrupted(lambda: run(user, rollout, "say os._exit(3)"))
    assert raised.value.category == FailureCategory.AGENT


async def test_names_and_texts_that_no_event_holds_are_told(
    tmp_path: Path, user: LocalUserCode
) -> None:
    """They ended as a dead letter, and the workspace was never answered."""
    files = {
        "rollouts/nul/main.py": HIDDEN + 'globals()["r\\0x"] = reward(score)\n',
        "rollouts/red/main.py": HIDDEN + 'Do.__qualname__ = Do.__name__ = "\\x1b[31mDo"\n',
        "rollouts/text/main.py": HIDDEN
        + '@rubric("good\\0?", model="m")\n'
        + "def good(solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs)"
        + " -> float: ...\n",
        "rollouts/fine/main.py": HIDDEN + "größe = reward(score)\n",
    }
    source = make_workspace(tmp_path / "hidden", files)
    repositories = GitRepositories(tmp_path / "hidden-git", settings=LAPTOP)
    sha = await repositories.fetch("w", CommitSpec(url=str(source)))
    found = await user.discover(await repositories.snapshot("w", sha), [])
    errors = {one.entrypoint.rollout: one.error or "" for one in found}
    assert "'r?x', which cannot be shown; rename it" in errors["nul"]
    assert "a rubric whose text has a NUL" in errors["text"]
    assert all("\0" not in one.model_dump_json() for one in found)
    assert errors["fine"] == ""


async def test_a_silent_end_and_an_endless_start_say_what_to_look_for(
    tmp_path: Path, user: LocalUserCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined, "START_S", 2.0)
    files = {
        "rollouts/ends/main.py": "import os\nos._exit(0)\n",
        "rollouts/loops/main.py": "while True:\n    pass\n",
        "rollouts/tells/main.py": "import os\nprint('why', flush=True)\nos._exit(0)\n",
    }
    source = make_workspace(tmp_path / "silent", files)
    repositories = GitRepositories(tmp_path / "silent-git", settings=LAPTOP)
    sha = await repositories.fetch("w", CommitSpec(url=str(source)))
    found = await user.discover(await repositories.snapshot("w", sha), [])
    errors = {one.entrypoint.rollout: one.error or "" for one in found}
    assert errors["ends"].startswith("the entry point's process ended while loading: it printed no")
    assert "did not load within 2 s: it printed nothing" in errors["loops"]
    assert ".pth files" in errors["loops"]
    assert errors["tells"].endswith("while loading: why")


async def test_entry_points_after_slow_ones_are_told_that_they_were_not_loaded(
    user: LocalUserCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 entry points that sleep when they are imported kept their workspace unanswered for an hour."""
    monkeypatch.setattr(sandbox, "DISCOVER_S", 1e-9)
    five, good = await user.discover(SNAPSHOT[-1], [])
    assert five.error == good.error == sandbox.NOT_LOADED


async def test_twin_without_the_model_the_whole_workspace_fails(
    user: LocalUserCode, rollout: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined, "parse_first", lambda role, data: json.loads(data))
    with pytest.raises(AttributeError):
        await user.discover(SNAPSHOT[-1], [])


MANY = '[{"index": 0, "reward": 1.0, "parts": {str(n): 1.0 for n in range(%d)}, "error": None}]'


async def grade(user: LocalUserCode, rollout: RolloutRef, label: str) -> object:
    return (
        await user.grade(
            rollout,
            owner=OWNER,
            group="g",
            label=label,
            metadata={},
            samples=[SampleRecord(index=0)],
        )
    ).grades


@pytest.mark.parametrize(
    "label",
    [
        MANY % 200_000,
        MANY % 5,
    ],
)
async def test_grades_are_of_the_samples_that_were_given_and_nothing_else(
    user: LocalUserCode, rollout: RolloutRef, label: str
) -> None:
    with pytest.raises((UserCodeError, TransientError), match="a pipe that is not its own"):
        await grade(user, rollout, label)


async def test_twin_without_the_check_any_parts_are_taken(
    user: LocalUserCode, rollout: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "check_grades", lambda *_, **__: None)
    (graded,) = (
        await user.grade(
            rollout,
            owner=OWNER,
            group="g",
            label=MANY % 5,
            metadata={},
            samples=[SampleRecord(index=0)],
        )
    ).grades
    assert len(graded.parts) == 5


async def test_a_text_that_no_encoding_has_is_a_message(
    user: LocalUserCode, rollout: RolloutRef
) -> None:
    assert await run(user, rollout, "surrogate") == "?"


GOOD = {"index": 0, "reward": 1.0, "parts": {}, "error": None}


@pytest.mark.parametrize(
    ("role", "data"),
    [
        ("workflow", b"{}"),
        ("workflow", b"\xff"),
        ("workflow", b"[" * 200_000),
        ("workflow", b'{"id": "x", "messages": [], "more": 1}'),
        ("workflow", b'{"id": "x", "category": "other", "error": "x"}'),
        ("workflow", b'{"id": "x", "grades": []}'),
        ("grader", b'{"id": "x", "messages": []}'),
        ("grader", json.dumps({"id": "g", "grades": [{**GOOD, "reward": "1"}]}).encode()),
        ("grader", json.dumps({"id": "g", "grades": [{**GOOD, "reward": 10**400}]}).encode()),
        ("grader", json.dumps({"id": "g", "grades": [{**GOOD, "reward": math.nan}]}).encode()),
        ("grader", json.dumps({"id": "g", "grades": [GOOD] * 5000}).encode()),
        (
            "grader",
            json.dumps(
                {"id": "g", "grades": [{**GOOD, "parts": dict.fromkeys(map(str, range(129)), 1.0)}]}
            ).encode(),
        ),
    ],
)
def test_types_sizes_and_counts_are_checked(role: str, data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_later(role, data)


@pytest.mark.parametrize(
    "grades", [[{**GOOD, "index": 7}], [GOOD, GOOD], [{**GOOD, "parts": {"other": 1.0}}]]
)
def test_grades_of_others_are_refused(grades: list[object]) -> None:
    said = parse_later("grader", json.dumps({"id": "g", "grades": grades}).encode())
    assert isinstance(said, Graded)
    with pytest.raises(ProtocolError):
        check_grades(said, indices=[0], parts=["exact"])


async def test_a_process_that_does_not_die_is_given_up(
    trusted: LocalUserCode, rollout: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined, "END_S", 0.05)
    await run(trusted, rollout, "fine")
    (process,) = trusted._warm.processes
    assert process._process is not None
    kill = process._process.kill
    monkeypatch.setattr(process._process, "kill", lambda: None)
    pidfd = os.pidfd_open(process._process.pid)
    async with asyncio.timeout(60):
        await process.aclose()
    assert not process.alive
    assert await run(trusted, rollout, "fine") == "done", "another one takes its place"
    kill()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
