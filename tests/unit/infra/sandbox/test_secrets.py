"""A sandbox gets the values of its owner's secrets, and nothing that comes back holds one."""

import base64
import io
import logging
import tarfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from infra import telemetry
from infra.ports.services import SandboxOwner, UserCodeRaised, UserOutput
from infra.sandbox.calls import CallingUserCode, UserCall
from infra.sandbox.host_messages import CallAnswer, Graded, Raised, Returned
from infra.sandbox.process import ProcessEnded
from infra.sandbox.sandbox import LocalUserCode
from schemas.artifact_refs import ArtifactRef
from schemas.errors import FailureCategory, TransientError, UserCodeError
from schemas.sampling import Message, SampleRecord
from schemas.secrets.masking import NO_MASKS
from schemas.secrets.secret_value import SecretValue
from schemas.specs import Entrypoint, RewardSpec, RolloutRef
from tests.kit.specs import ref

LEVEL = "process"
VALUE = "hush-hush-0123456789"
MASK = "***KEY***"

MAIN = """
import os
from headrace import AgentWorkflow


class Show(AgentWorkflow):
    async def run(self, ctx):
        return [{"role": "assistant", "content": "".join(reversed(os.environ["KEY"]))}]
"""


def owner(value: str = VALUE) -> SandboxOwner:
    return SandboxOwner(run="run-1", secrets={"KEY": SecretValue(value)})


def rollout(snapshot: ArtifactRef | None = None) -> RolloutRef:
    return RolloutRef(
        snapshot=snapshot or ref("tree"),
        commit="c" * 40,
        entrypoint=Entrypoint(rollout="say"),
        workflow="Show",
        grader="Check",
        rewards=(RewardSpec(name="exact"),),
        secrets=("KEY",),
    )


class Scripted(CallingUserCode):
    """User code whose process answers, or fails, as a test says."""

    def __init__(self, answer: CallAnswer | Exception) -> None:
        self._answer = answer

    async def make_call(self, call: UserCall) -> CallAnswer:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    async def ask(self) -> str:
        result = await self.run_workflow(
            rollout(),
            owner=owner(),
            sample="s",
            prompt=[],
            metadata={},
            base_path="/v1",
            api_key="k",
        )
        return repr(result)

    async def rate(self) -> str:
        grades = (
            await self.grade(
                rollout(),
                owner=owner(),
                group="g",
                label=None,
                metadata={},
                samples=[SampleRecord(index=0)],
            )
        ).grades
        return repr(grades)


def returned(text: str) -> Returned:
    message = {"role": "assistant", "content": text}
    return Returned.model_validate({"id": "s", "messages": [message]})


def graded(error: str) -> Graded:
    grade: Mapping[str, object] = {"index": 0, "reward": None, "parts": {}, "error": error}
    return Graded.model_validate({"id": "g", "grades": [grade]})


async def test_messages_and_grades_are_masked() -> None:
    assert MASK in await Scripted(returned(f"I saw {VALUE}")).ask()
    assert VALUE not in await Scripted(returned(f"I saw {VALUE}")).ask()
    shown = await Scripted(graded(f"returned '{VALUE[:16]}'; return a number")).rate()
    assert MASK in shown
    assert VALUE[:12] not in shown, "also a part of it, because the text may have been cut"


def left(category: str | None) -> CallAnswer:
    """An answer, or an error of this category, with output that holds the value in every place."""
    data = base64.b64encode(b"\xff" + VALUE.encode() + b"\x00").decode()
    output = {
        "stdout": f"printed {VALUE} and {VALUE[:14]}",
        "traceback": f"ValueError: {VALUE}",
        "files": {VALUE: data},
    }
    if category is None:
        return Returned.model_validate({"id": "s", "messages": None, "output": output})
    body = {"id": "s", "category": category, "error": f"said {VALUE}", "output": output}
    return Raised.model_validate(body)


@pytest.mark.parametrize("category", [None, "raised", "timeout"])
async def test_the_output_of_user_code_is_masked(category: str | None) -> None:
    scripted, said = Scripted(left(category)), None
    try:
        result = await scripted.run_workflow(
            rollout(), owner=owner(), sample="s", prompt=[], metadata={}, base_path="", api_key="k"
        )
        output = result.output
    except UserCodeRaised as error:
        output, said = error.output, error.message
    assert said == (None if category is None else f"said {MASK}")
    assert output == UserOutput(
        stdout=f"printed {MASK} and {MASK}",
        traceback=f"ValueError: {MASK}",
        files={MASK: b"\xff" + MASK.encode() + b"\x00"},
    )


@pytest.mark.parametrize("raised", [TransientError, ProcessEnded])
async def test_errors_are_masked_with_everything_that_they_carry(
    raised: type[TransientError],
) -> None:
    with pytest.raises(UserCodeError) as failed:
        await Scripted(UserCodeError(FailureCategory.AGENT, f"it said {VALUE}")).ask()
    assert failed.value.message == f"it said {MASK}"
    with pytest.raises(TransientError) as ended:
        await Scripted(raised(f"its output was {VALUE[4:]}")).ask()
    for error in (failed.value, ended.value):
        shown = logging.Formatter().formatException((type(error), error, error.__traceback__))
        assert VALUE[4:] not in shown


async def test_the_twin_without_masks_shows_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SandboxOwner, "masks", NO_MASKS)
    assert VALUE in await Scripted(returned(f"I saw {VALUE}")).ask()


async def test_log_lines_are_masked_once_user_code_was_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry, "_masks", ())
    record = logging.LogRecord("x", logging.INFO, "f", 1, "it is %s", (VALUE,), None)
    line = telemetry.JsonLines("worker").format
    assert VALUE in line(record), "the twin"
    await Scripted(returned("x")).ask()
    assert VALUE not in line(record)
    assert MASK in line(record)
    for number in range(200):
        telemetry.mask_logs(owner(f"another-value-{number}").masks)
    assert len(telemetry._masks) == telemetry.MOST_MASKS


def test_an_owner_does_not_show_its_secrets() -> None:
    assert VALUE not in repr(owner())
    assert VALUE not in repr(owner().masks)
    assert owner() == owner()
    assert owner() != owner("another-value")


@pytest.fixture
async def user() -> AsyncIterator[LocalUserCode]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo("rollouts/say/main.py")
        entry.size = len(MAIN)
        tar.addfile(entry, io.BytesIO(MAIN.encode()))

    async def fetch(ref: ArtifactRef) -> bytes:
        return buffer.getvalue()

    made = LocalUserCode(LEVEL, fetch=fetch)
    yield made
    await made.aclose()


@pytest.mark.processes
async def test_a_new_value_is_used_by_the_next_call(user: LocalUserCode, tmp_path: Path) -> None:
    """A warm process keeps the value that it started with, so it is not used again."""

    async def show(value: str) -> str:
        result = await user.run_workflow(
            rollout(),
            owner=owner(value),
            sample="s",
            prompt=[Message(role="user", content="x")],
            metadata={},
            base_path="/v1",
            api_key="k",
        )
        assert result.messages is not None
        return result.messages[-1].content

    assert await show("value-before") == "erofeb-eulav"
    assert await show("value-after-") == "-retfa-eulav"
    assert await show("value-before") == "erofeb-eulav"
