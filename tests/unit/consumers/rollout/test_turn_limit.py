"""A workflow that goes on after its last turn. The gateway refuses it, so its attempt is a failed one of
the policy, and figures count it as 0."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from consumers.evaluate import CONSUMER as EVALUATE
from consumers.rollout.consumer import perform
from headrace import WorkflowContext
from infra.model_api.gateway.server import HttpGateway
from infra.sandbox.calls import CallingUserCode, UserCall
from infra.sandbox.host_messages import CallAnswer, Raised, Returned
from schemas.effects import GenerateSample, SampleFinished
from schemas.events import (
    EvaluationCompleted,
    EvaluationRequested,
    Event,
    GroupGraded,
    GroupsRequested,
)
from schemas.sampling import Grade, SampleBatch, SampleRecord
from schemas.specs import GroupSpec, SampleEntry
from tests.kit.decider import given
from tests.kit.fakes import bench
from tests.kit.scripted_policy import ScriptedPolicy, said
from tests.kit.sockets import relayed
from tests.kit.specs import ref, template
from tests.unit.consumers.rollout.test_rollout import ROW


class AskingUserCode(CallingUserCode):
    """A workflow that asks three times, in this process."""

    def __init__(self, host: str) -> None:
        self._host = host

    async def make_call(self, call: UserCall) -> CallAnswer:
        message = json.loads(call.message)
        ctx = WorkflowContext(
            prompt=message["prompt"],
            metadata={},
            base_url=f"{self._host}{message['base_path']}",
            api_key=message["api_key"],
        )
        try:
            for _ in range(3):
                await ctx.chat(ctx.prompt)
        except Exception as error:  # as the host of user code, which reports whatever that raises
            return Raised(id="1", category="raised", error=str(error))
        return Returned(id="1", messages=None)


async def made(
    directory: Path, spec: GroupSpec, *, max_turns: int | None
) -> tuple[SampleRecord, SampleEntry]:
    """The sample of a group whose workflow asks three times."""
    world = bench(directory)
    rollout = spec.template.rollout
    assert rollout is not None
    of = spec.template.model_copy(
        update={
            "dataset": await world.dataset(ROW),
            "rollout": rollout.model_copy(update={"workflow": "Ask", "max_turns": max_turns}),
        }
    )
    policy = ScriptedPolicy([said("one")])
    gateway = HttpGateway(policy)
    await gateway.start()
    try:
        async with relayed(await gateway.open_socket(spec.owner)) as host:
            ports = replace(world.ports, sampler=policy, gateway=gateway, user=AskingUserCode(host))
            effect = GenerateSample(spec=spec.model_copy(update={"template": of}), index=0)
            outcome = await perform(effect, ports)
    finally:
        await gateway.aclose()
    assert isinstance(outcome, SampleFinished)
    stored = await world.ports.artifacts.get_artifact(outcome.artifact)
    (record,) = SampleBatch.model_validate_json(stored).samples
    return record, outcome.entry


def completed(events: Sequence[Event]) -> EvaluationCompleted:
    (found,) = [event for event in events if isinstance(event, EvaluationCompleted)]
    return found


@pytest.mark.parametrize(("max_turns", "is_failed"), [(2, True), (3, False), (None, False)])
async def test_an_attempt_beyond_its_turns_fails_because_of_the_policy_and_counts_as_0(
    tmp_path: Path, max_turns: int | None, *, is_failed: bool
) -> None:
    request = EvaluationRequested(
        evaluation="e1",
        eval_name="e1",
        template=template(num_samples=1),
        rows=(0, 0),
        batch_size=2,
        pass_threshold=1.0,
        run="r1",
        step=4,
    )
    asked = given(EVALUATE).when(request)
    world = asked.after()
    (groups,) = [event for event in asked.events if isinstance(event, GroupsRequested)]
    limited, other = groups.group_specs()
    record, entry = await made(tmp_path, limited, max_turns=max_turns)
    if is_failed:
        assert record.failure is not None
        assert record.failure.category == entry.failure == "agent_error"
        assert "answered 400: the sample has made 2 of at most 2 turns" in record.failure.message
    else:
        assert (record.failure, entry.failure) == (None, None)
    for spec, what, reward in (
        (limited, entry, None if is_failed else 1.0),
        (other, SampleEntry(index=0, completion_tokens=2), 1.0),
    ):
        graded = GroupGraded(
            spec=spec,
            artifact=ref(spec.group),
            entries=(what,),
            grades=(Grade(index=0, reward=reward),),
        )
        told = world.when(graded)
        world = told.after()
    done = completed(told.events)
    assert done.reward == done.metrics["eval/pass@1"] == (0.5 if is_failed else 1.0)
    assert (done.metrics["eval/failed"], done.metrics["eval/left_out"]) == (int(is_failed), 0)
