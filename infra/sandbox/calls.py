"""Calls of user code: a call as its process gets it, and what its answer means.

The process that asks and the process that runs user code may be two. So a call holds its message as the
JSON that `headrace/user_code/user_code_host.py` gets, which whatever is in between passes on as it is.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from infra.ports.services import (
    Credit,
    GraderResult,
    SandboxOwner,
    ServedResult,
    UserCodeRaised,
    UserOutput,
    WorkflowResult,
)
from infra.sandbox.host_messages import (
    CallAnswer,
    Graded,
    NotServed,
    ProtocolError,
    Raised,
    ReportedOutput,
    Returned,
    ReturnedMessage,
    SampleGrade,
    Served,
    check_grades,
    read_files,
)
from schemas.errors import FailureCategory, TransientError, UserCodeError
from schemas.models.openai_messages import openai_message
from schemas.sampling import Grade, Message, SampleFailure, SampleRecord
from schemas.secrets.masking import Masks
from schemas.specs import RolloutRef

Role = Literal["workflow", "grader", "server"]
Result = Returned | Graded | Served

NOT_SERVED = {
    "timeout": FailureCategory.TIMEOUT,
    "raised": FailureCategory.AGENT,
    "invalid": FailureCategory.VALIDATION,
    "process": FailureCategory.PROCESS,
    "again": FailureCategory.PROCESS,
}
"""The categories of the failures of a rollout server. `again` never arrives here from one of ours."""

SERVER_SLACK_S = 60.0
"""How long a rollout server may take beside its workflow and its grader."""


@dataclass(frozen=True, slots=True)
class UserCall:
    """One call of a role of a rollout. `name` is the sample or the group. `message` is a JSON object
    with at least one key, and neither `id` nor `deadline_s`."""

    rollout: RolloutRef
    owner: SandboxOwner
    role: Role
    name: str
    deadline_s: float
    message: bytes


class CallingUserCode(ABC):
    """The half of `infra.ports.services.UserCode` that makes calls and reads their answers."""

    @abstractmethod
    async def make_call(self, call: UserCall) -> CallAnswer:
        """Make one attempt at a call, and return its answer (Raised when user code failed). Raises
        UserCodeError when its process failed, CallInterrupted when its process ended during the call,
        and TransientError when there was no answer. The next attempt starts from the beginning."""

    async def _call(self, call: UserCall) -> tuple[Result, UserOutput | None]:
        """Make a call and return its answer, and what user code left behind. The secrets of its owner
        are masked in both, also in errors. Their texts may have been cut, so parts of a secret are
        masked too. Raises UserCodeError, TransientError."""
        masks = call.owner.masks
        answer = await self._call_masked(call, masks)
        output = None
        if answer.output is not None:
            is_small = not masks and not answer.output.files
            output = (
                _output(answer.output, masks)
                if is_small
                else await asyncio.to_thread(_output, answer.output, masks)
            )
        if isinstance(answer, NotServed):
            raise UserCodeRaised(NOT_SERVED[answer.category], answer.error, output=output)
        if not isinstance(answer, Raised):
            return answer, output
        raised = FailureCategory.GRADER if call.role == "grader" else FailureCategory.AGENT
        category = FailureCategory.TIMEOUT if answer.category == "timeout" else raised
        raise UserCodeRaised(category, answer.error, output=output)

    async def _call_masked(self, call: UserCall, masks: Masks) -> CallAnswer:
        if not masks:
            return await self.make_call(call)
        from infra import telemetry  # not at the top: a sandbox service needs none

        telemetry.mask_logs(masks)
        try:
            return _mask_answer(await self.make_call(call), masks)
        except UserCodeError as error:
            raise UserCodeError(error.category, masks.cut_text(error.message)) from None
        except TransientError as error:
            raise type(error)(masks.cut_text(str(error))) from None

    async def run_workflow(
        self,
        rollout: RolloutRef,
        *,
        owner: SandboxOwner,
        sample: str,
        prompt: Sequence[Message],
        metadata: Mapping[str, object],
        base_path: str,
        api_key: str,
    ) -> WorkflowResult:
        message = {
            "prompt": [openai_message(m) for m in prompt],
            "metadata": dict(metadata),
            "base_path": base_path,
            "api_key": api_key,
            "max_turns": rollout.max_turns,
        }
        deadline_s = rollout.workflow_timeout_s
        data = json.dumps(message).encode()
        call = UserCall(rollout, owner, "workflow", sample, deadline_s, data)
        answer, output = await self._call(call)
        if not isinstance(answer, Returned):
            return WorkflowResult(None, output)
        spoken = answer.messages
        messages = None if spoken is None else tuple(_message(message) for message in spoken)
        credit = Credit(
            dict(answer.turn_rewards), dict(answer.turn_agents), dict(answer.agent_rewards)
        )
        return WorkflowResult(messages, output, credit)

    async def run_served(
        self,
        rollout: RolloutRef,
        *,
        owner: SandboxOwner,
        sample: str,
        prompt: Sequence[Message],
        label: str | None,
        metadata: Mapping[str, object],
        base_path: str,
        api_key: str,
    ) -> ServedResult:
        message = {
            "prompt": [m.model_dump() for m in prompt],
            "label": label,
            "metadata": dict(metadata),
            "base_path": base_path,
            "api_key": api_key,
            "agent_timeout_s": rollout.workflow_timeout_s,
            "grader_timeout_s": rollout.grader_timeout_s,
        }
        deadline_s = rollout.workflow_timeout_s + rollout.grader_timeout_s + SERVER_SLACK_S
        data = json.dumps(message).encode()
        call = UserCall(rollout, owner, "server", sample, deadline_s, data)
        answer, output = await self._call(call)
        if not isinstance(answer, Served):
            raise UserCodeError(
                FailureCategory.PROCESS, "the rollout server's host returned no grade"
            )
        return ServedResult(_grade(answer.grade), output)

    async def grade(
        self,
        rollout: RolloutRef,
        *,
        owner: SandboxOwner,
        group: str,
        label: str | None,
        metadata: Mapping[str, object],
        samples: Sequence[SampleRecord],
    ) -> GraderResult:
        message = {
            "label": label,
            "metadata": dict(metadata),
            "rewards": [reward.model_dump() for reward in rollout.rewards],
            "rubrics": [rubric.name for rubric in rollout.rubrics if rubric.asks],
            "grader": rollout.grader is not None,
            "samples": [
                {
                    "name": f"sample_{record.index}",
                    "index": record.index,
                    "text": record.text,
                    "messages": [openai_message(m) for m in record.messages],
                    "branches": [
                        [openai_message(m) for m in branch]
                        for branch in record.branches or (record.messages,)
                    ],
                    "truncated": record.truncated,
                    "failure": str(record.failure.category) if record.failure else None,
                }
                for record in samples
            ],
        }
        deadline_s = rollout.grader_timeout_s
        data = json.dumps(message).encode()
        call = UserCall(rollout, owner, "grader", group, deadline_s, data)
        answer, output = await self._call(call)
        if not isinstance(answer, Graded):
            raise UserCodeError(FailureCategory.GRADER, "the grader's process returned no grades")
        names = [reward.name for reward in rollout.rewards]
        try:
            check_grades(answer, indices=[record.index for record in samples], parts=names)
        except ProtocolError as error:
            text = f"the grader's process wrote into a pipe that is not its own: {error}"
            raise UserCodeError(FailureCategory.PROCESS, text) from error
        return GraderResult(tuple(_grade(grade) for grade in answer.grades), output)


def _output(reported: ReportedOutput, masks: Masks) -> UserOutput:
    """Return what a process says that user code left behind, masked. Raises UserCodeError when it is
    not what a process may send."""
    try:
        files = read_files(reported)
    except ProtocolError as error:
        text = f"its process wrote into a pipe that is not its own: {error}"
        raise UserCodeError(FailureCategory.PROCESS, text) from error
    if masks:
        files = {masks.text(name): masks.data(data) for name, data in files.items()}
    return UserOutput(
        stdout=masks.cut_text(reported.stdout),
        traceback=reported.traceback and masks.cut_text(reported.traceback),
        files=files,
        is_cut=reported.is_cut,
    )


def _mask_answer(answer: CallAnswer, masks: Masks) -> CallAnswer:
    if isinstance(answer, Raised | NotServed):
        return answer.model_copy(update={"error": masks.cut_text(answer.error)})
    if isinstance(answer, Served):
        grade = answer.grade
        masked = grade.model_copy(update={"error": grade.error and masks.cut_text(grade.error)})
        return answer.model_copy(update={"grade": masked})
    if isinstance(answer, Graded):
        grades = [
            grade.model_copy(
                update={
                    "error": grade.error and masks.cut_text(grade.error),
                    "questions": {name: masks.text(text) for name, text in grade.questions.items()},
                }
            )
            for grade in answer.grades
        ]
        return answer.model_copy(update={"grades": grades})
    if answer.messages is None:
        return answer
    messages = [_mask_message(spoken, masks) for spoken in answer.messages]
    return answer.model_copy(update={"messages": messages})


def _mask_message(spoken: ReturnedMessage, masks: Masks) -> ReturnedMessage:
    """Mask every text of a message."""
    fields = ("role", "content", "reasoning", "tool_call_id", "name")
    calls = [
        call.model_copy(
            update={key: masks.text(getattr(call, key)) for key in type(call).model_fields}
        )
        for call in spoken.tool_calls
    ]
    masked = {key: text and masks.text(text) for key in fields if (text := getattr(spoken, key))}
    return spoken.model_copy(update={**masked, "tool_calls": calls})


def _message(spoken: ReturnedMessage) -> Message:
    try:
        return Message.model_validate(spoken.model_dump())
    except ValueError as error:
        raise UserCodeError(
            FailureCategory.VALIDATION, f"run returned an invalid message: {error}"
        ) from error


def _grade(paid: SampleGrade) -> Grade:
    category = FailureCategory.GRADER if paid.raised else FailureCategory.VALIDATION
    failure = SampleFailure(category=category, message=paid.error) if paid.error else None
    return Grade(
        index=paid.index,
        reward=paid.reward,
        parts=paid.parts,
        failure=failure,
        questions=paid.questions,
    )
