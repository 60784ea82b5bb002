"""Makes samples: dataset row -> conversation -> turns -> a record in an artifact.

A sample fails when its workflow raises, hangs or sends no request, or when its prompt is too long. The
failure is written into its record, and the other samples continue. A failure of the platform is raised,
so that the effect runs again. A failed sample has no sequences, because there is nothing in it to train
on. The row's label is never passed to a workflow, which sees only the prompt and the metadata. A rollout
server grades its own samples, so it gets the label, and its grade is part of the record.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from consumers.rollout.reward_models import ask_reward_models
from consumers.stored_files import store_output
from consumers.user_code.interrupted_calls import until_uninterrupted
from consumers.user_code.user_secrets import sandbox_owner
from infra.ports.secrets import SecretStore
from infra.ports.services import (
    Credit,
    Datasets,
    Gateway,
    SandboxOwner,
    Session,
    UserCode,
    UserCodeRaised,
    UserOutput,
)
from infra.spine.ports.artifacts import Artifacts
from infra.spine.ports.event_log import EventStore
from infra.spine.runtime.error_excerpt import excerpt
from schemas.artifact_refs import ArtifactRef
from schemas.datasets import DatasetRow
from schemas.effects import GenerateGroup, GenerateSample, GroupSampled, SampleFinished
from schemas.errors import (
    CorruptData,
    FailureCategory,
    Refused,
    SamplerBusy,
    TransientError,
    UserCodeError,
)
from schemas.ids import sample_id
from schemas.models.reward_model import Scorer
from schemas.sampling import (
    Grade,
    Message,
    RewardedTurn,
    SampleBatch,
    SampleFailure,
    Sampler,
    SampleRecord,
    SampleRequest,
    ToolSpec,
    Turn,
    sequences_and_rows_of,
    sequences_of,
)
from schemas.specs import GroupSpec, RolloutRef, SampleEntry

NEVER_ASKED = SampleFailure(
    category=FailureCategory.VALIDATION,
    message="the workflow sent no request to the policy; call ctx.chat, or send a request to "
    "ctx.base_url, before it returns",
)


@dataclass(frozen=True, slots=True)
class RolloutPorts:
    """The sampler, the sandbox with the user's workflow and its way to the sampler, the rows, the reward
    models, and the log with the samples of other runs."""

    sampler: Sampler
    gateway: Gateway
    user: UserCode
    secrets: SecretStore
    datasets: Datasets
    artifacts: Artifacts
    scorer: Scorer
    log: EventStore


async def generate_group(effect: GenerateGroup, ports: RolloutPorts) -> GroupSampled:
    """Sample a group, one turn per sample. All requests are in flight together, so the engine batches
    them. Raises TransientError when the engine is gone."""
    sampler = ports.sampler
    spec = effect.spec
    row = (await ports.datasets.rows(spec.template.dataset))[spec.row]
    requests = [_request(spec, i, row) for i in range(spec.template.num_samples)]
    turns = await asyncio.gather(
        *(_sample_turn(sampler, request) for request in requests), return_exceptions=True
    )
    records = []
    for index, turn in enumerate(turns):
        if isinstance(turn, BaseException):
            raise turn
        record = _single_turn_record(index, row.prompt, turn)
        if spec.template.rollout is not None:
            record = await ask_reward_models(record, spec.template.rollout, ports.scorer)
        records.append(record)
    batch = SampleBatch(group=spec.group, samples=tuple(records))
    artifact = await ports.artifacts.put_artifact(batch.model_dump_json().encode(), run=spec.owner)
    entries = alarm_once(entry_of(record, num_samples=len(records)) for record in records)
    return GroupSampled(effect=effect, artifact=artifact, entries=entries)


def _request(spec: GroupSpec, index: int, row: DatasetRow) -> SampleRequest:
    template = spec.template
    return SampleRequest(
        model=template.model,
        policy=template.policy,
        tuning=template.tuning,
        lora_alpha=template.lora_alpha,
        lora_scaling=template.lora_scaling,
        params=template.params,
        key=spec.draw_key(index),
        messages=row.prompt,
        tools=row.tools,
        avoid=template.avoid,
    )


async def _sample_turn(sampler: Sampler, request: SampleRequest) -> Turn | SampleFailure:
    try:
        return await sampler.sample(request)
    except UserCodeError as error:
        return SampleFailure(category=error.category, message=error.message)


def _single_turn_record(
    index: int, prompt: tuple[Message, ...], turn: Turn | SampleFailure
) -> SampleRecord:
    if isinstance(turn, SampleFailure):
        return SampleRecord(index=index, messages=prompt, failure=turn)
    return record_of(index, (turn,), (*prompt, turn.message), failure=None)


class _Attempt(NamedTuple):
    """One attempt at a sample: its session, which is closed, the requests that it made there, what the
    workflow or the server returned, what it left behind, and what it said about turns and agents."""

    session: Session
    turns: tuple[Turn, ...]
    conversation: tuple[Message, ...]
    returned: tuple[Message, ...] | Grade | SampleFailure | None
    left: UserOutput | None
    credit: Credit


async def generate_sample(effect: GenerateSample, ports: RolloutPorts) -> SampleFinished:
    """Run the workflow once against a session of its own. Raises TransientError when the engine or
    the sandbox is gone, and SamplerBusy when the engine waits for another worker."""
    rollout = _rollout_of(effect)
    row = (await ports.datasets.rows(effect.spec.template.dataset))[effect.spec.row]
    await _await_sampler(ports.sampler, _request(effect.spec, effect.index, row))
    try:
        owner = await sandbox_owner(effect.spec, rollout, ports.secrets)
    except UserCodeError as error:
        unset = SampleFailure(category=error.category, message=error.message)
        record = record_of(effect.index, (), row.prompt, failure=unset)
        return await _finish(effect, record, ports)

    async def make_attempt() -> _Attempt:
        session = ports.gateway.open(
            effect.spec, effect.index, deadline_s=rollout.workflow_timeout_s, masks=owner.masks
        )
        try:
            make = _have_served if rollout.kind == "server" else _run_workflow
            returned, left, credit = await make(effect, owner, row, ports, session)
        finally:
            turns, conversation = session.close()
        return _Attempt(session, turns, conversation, returned, left, credit)

    session, turns, conversation, returned, left, credit = await until_uninterrupted(make_attempt)
    if session.interrupted:
        failed = SamplerBusy if session.waits_for_sampler else TransientError
        raise failed("the engine failed a request of this sample; the sample is generated again")
    failure = _why_failed(returned, session, is_answered=bool(turns))
    failure = failure or _wrong_credit(credit, num_turns=len(turns))
    messages = returned if isinstance(returned, tuple) else conversation
    is_trained = failure is not None and failure.category in rollout.failed_rewards
    order = _row_order(turns, rules=effect.spec.template.rules)
    record = record_of(
        effect.index, turns, messages, failure=failure, is_trained=is_trained, order=order
    )
    branches = session.branches if len(session.branches) > 1 else ()
    record = record.model_copy(update={"tools": session.tools, "branches": branches})
    reads_hint = effect.spec.template.teacher_hint is not None and bool(record.sequences)
    if reads_hint and any(tools != session.tools for tools in session.offered):
        record = record.model_copy(update={"row_tools": _row_tools(turns, order, session.offered)})
    if record.sequences and (credit.is_given or order != sorted(order)):
        found = {
            "turns": _recorded_turns(turns, order, credit),
            "agent_rewards": dict(credit.agent_rewards),
        }
        record = record.model_copy(update=found)
    if isinstance(returned, Grade):
        grade = returned.model_copy(update={"index": effect.index})
        record = record.model_copy(update={"grade": grade})
    return await _finish(effect, record, ports, left)


def _why_failed(returned: object, session: Session, *, is_answered: bool) -> SampleFailure | None:
    """How a sample failed, or None. A workflow that raises after the engine refused its newest request
    failed because of that, and not because of what the policy wrote."""
    failure = returned if isinstance(returned, SampleFailure) else None
    if failure is None and not is_answered:
        return session.refusal or NEVER_ASKED
    if failure is not None and failure.category == FailureCategory.AGENT:
        return session.refusal or failure
    return failure


def _wrong_credit(credit: Credit, *, num_turns: int) -> SampleFailure | None:
    """Return the failure of a sample whose workflow named a turn that it does not have, or gave a reward
    to an agent without a turn."""
    message = None
    for what, call, of in (
        ("a reward", "set_turn_reward", credit.turn_rewards),
        ("an agent", "set_turn_agent", credit.turn_agents),
    ):
        wrong = next((turn for turn in sorted(of) if turn >= num_turns), None)
        if message is None and wrong is not None:
            message = (
                f"the workflow set {what} for turn {wrong}, but {num_turns} requests were answered; "
                f"give ctx.{call} the number of an answer, 0 for the first"
            )
    idle = sorted(credit.agent_rewards.keys() - set(credit.turn_agents.values()))
    if message is None and idle:
        message = (
            f"the workflow set a reward for agent {idle[0]!r}, which has no turn; call "
            "ctx.set_turn_agent for each of its answers"
        )
    if message is None:
        return None
    return SampleFailure(category=FailureCategory.VALIDATION, message=message)


def _row_order(turns: Sequence[Turn], *, rules: int) -> list[int]:
    """The numbers of the turns, in the order in which they become training rows. That of their tokens
    does not depend on which of several open requests arrived first, and a turn comes before those that
    go on from it. Before rules 7 it was the order in which they arrived."""
    numbers = list(range(len(turns)))
    if rules < 7:
        return numbers
    return sorted(numbers, key=lambda n: (turns[n].prompt_ids, turns[n].completion_ids))


def _recorded_turns(
    turns: tuple[Turn, ...], order: Sequence[int], credit: Credit
) -> tuple[RewardedTurn, ...]:
    _, rows = sequences_and_rows_of(tuple(turns[number] for number in order))
    return tuple(
        RewardedTurn(
            row=row,
            num_actions=len(turns[number].completion_ids),
            reward=credit.turn_rewards.get(number),
            agent=credit.turn_agents.get(number),
            number=None if number == place else number,
        )
        for place, (number, row) in enumerate(zip(order, rows, strict=True))
    )


def _row_tools(
    turns: tuple[Turn, ...], order: Sequence[int], offered: Sequence[tuple[ToolSpec, ...]]
) -> tuple[tuple[ToolSpec, ...], ...]:
    """The tools that the first request of each row offered. Other tools begin a new row, unless the
    model's chat template does not show them."""
    sequences, rows = sequences_and_rows_of(tuple(turns[number] for number in order))
    return tuple(offered[order[rows.index(row)]] for row in range(len(sequences)))


def _rollout_of(effect: GenerateSample) -> RolloutRef:
    """Raises CorruptData for a group without a rollout, because GenerateGroup makes those."""
    rollout = effect.spec.template.rollout
    if rollout is None:
        raise CorruptData(f"group {effect.spec.group} has no rollout to make its samples")
    return rollout


async def _finish(
    effect: GenerateSample,
    record: SampleRecord,
    ports: RolloutPorts,
    left: UserOutput | None = None,
) -> SampleFinished:
    """Store the record of a sample, with the scores of reward models and what its user code left
    behind."""
    files: tuple[ArtifactRef, ...] = ()
    record = await ask_reward_models(record, _rollout_of(effect), ports.scorer)
    if left is not None:
        output = await store_output(left, ports.artifacts, run=effect.spec.owner)
        record = record.model_copy(update={"output": output})
        files = tuple(output.files.values())
    batch = SampleBatch(group=effect.spec.group, samples=(record,))
    data = batch.model_dump_json().encode()
    artifact = await ports.artifacts.put_artifact(data, run=effect.spec.owner)
    return SampleFinished(effect=effect, artifact=artifact, entry=entry_of(record), files=files)


async def _await_sampler(sampler: Sampler, request: SampleRequest) -> None:
    """Wait until the policy can be sampled from, so that this time does not count as the workflow's. If
    the policy is refused, the workflow's first request gets the error."""
    with contextlib.suppress(Refused, CorruptData):
        await sampler.prepare(request)


async def _run_workflow(
    effect: GenerateSample,
    owner: SandboxOwner,
    row: DatasetRow,
    ports: RolloutPorts,
    session: Session,
) -> tuple[tuple[Message, ...] | SampleFailure | None, UserOutput | None, Credit]:
    """Return the messages that the workflow returned (None if it returned none), or how it failed. Also
    return what it left behind, and what it said about turns and agents."""
    spec, rollout = effect.spec, _rollout_of(effect)
    try:
        result = await ports.user.run_workflow(
            rollout,
            owner=owner,
            sample=sample_id(spec.group_key.id, effect.index),
            prompt=row.prompt,
            metadata=row.metadata,
            base_path=session.base_path,
            api_key=session.api_key,
        )
    except UserCodeError as error:
        left = error.output if isinstance(error, UserCodeRaised) else None
        return SampleFailure(category=error.category, message=error.message), left, Credit()
    return result.messages, result.output, result.credit


async def _have_served(
    effect: GenerateSample,
    owner: SandboxOwner,
    row: DatasetRow,
    ports: RolloutPorts,
    session: Session,
) -> tuple[Grade | SampleFailure, UserOutput | None, Credit]:
    """Return the grade that the rollout server gave to its attempt, or how the attempt failed. Also
    return what it left behind."""
    spec, rollout = effect.spec, _rollout_of(effect)
    try:
        result = await ports.user.run_served(
            rollout,
            owner=owner,
            sample=sample_id(spec.group_key.id, effect.index),
            prompt=row.prompt,
            label=row.label,
            metadata=row.metadata,
            base_path=session.base_path,
            api_key=session.api_key,
        )
    except UserCodeError as error:
        left = error.output if isinstance(error, UserCodeRaised) else None
        return SampleFailure(category=error.category, message=error.message), left, Credit()
    return result.grade, result.output, Credit()


def record_of(
    index: int,
    turns: tuple[Turn, ...],
    messages: tuple[Message, ...],
    *,
    failure: SampleFailure | None,
    is_trained: bool = False,
    order: Sequence[int] | None = None,
) -> SampleRecord:
    """Return the record of a sample. Its prompt tokens are those that the policy got, its completion
    tokens those that the policy chose, and its text is the last answer of the conversation. A sample
    that failed has no training rows, unless it `is_trained`. The turns become rows in this `order`, that
    of their numbers if it is None."""
    ordered = [turns[number] for number in order or range(len(turns))]
    sequences = sequences_of(tuple(turn for turn in ordered if turn.usage is None))
    num_tokens = sum(len(sequence.tokens) for sequence in sequences)
    num_actions = sum(sum(sequence.loss_mask) for sequence in sequences)
    bought = [turn.usage for turn in turns if turn.usage is not None]
    prices = [usage.usd for usage in bought if usage.usd is not None]
    answers = [message.content for message in messages if message.role == "assistant"]
    return SampleRecord(
        index=index,
        messages=messages,
        text=answers[-1] if answers else turns[-1].text if turns else "",
        sequences=sequences if failure is None or is_trained else (),
        num_turns=len(turns),
        prompt_tokens=num_tokens - num_actions + sum(usage.prompt_tokens for usage in bought),
        completion_tokens=num_actions + sum(usage.completion_tokens for usage in bought),
        truncated=any(turn.finish_reason == "length" for turn in turns),
        failure=failure,
        alarm=next((turn.alarm for turn in turns if turn.alarm), None),
        usd=sum(prices) if prices else None,
        servers=tuple(dict.fromkeys(turn.server for turn in turns if turn.server is not None)),
    )


def entry_of(record: SampleRecord, *, num_samples: int = 1) -> SampleEntry:
    """Return a record's index entry, small enough for an event about `num_samples` samples."""
    failure = record.failure
    return SampleEntry(
        index=record.index,
        failure=str(failure.category) if failure else None,
        message=excerpt(failure.message, num_samples=num_samples) if failure else None,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        num_turns=record.num_turns,
        truncated=record.truncated,
        alarm=excerpt(record.alarm) if record.alarm else None,
        usd=record.usd,
    )


def alarm_once(entries: Iterable[SampleEntry]) -> tuple[SampleEntry, ...]:
    """Return the entries for one event. Only the first entry with an alarm about the engine keeps it."""
    has_alarm, kept = False, []
    for entry in entries:
        kept.append(entry.model_copy(update={"alarm": None}) if has_alarm else entry)
        has_alarm = has_alarm or entry.alarm is not None
    return tuple(kept)
