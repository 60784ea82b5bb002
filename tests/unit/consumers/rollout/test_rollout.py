"""The rollout consumer ends a requested group with exactly its samples, each recorded once."""

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as holds_for
from hypothesis import strategies as st

from consumers.rollout.consumer import CONSUMER, perform
from consumers.user_code import interrupted_calls
from infra.blobs.artifacts import reference
from infra.ports.services import Credit, UserCodeRaised, UserOutput, WorkflowResult
from producers.http.routes.samples import rewarded_turns
from schemas.artifact_refs import ArtifactRef
from schemas.datasets import DatasetRow
from schemas.effects import (
    Failed,
    GenerateGroup,
    GenerateSample,
    GroupSampled,
    Outcome,
    SampleFinished,
)
from schemas.errors import (
    CallInterrupted,
    FailureCategory,
    Refused,
    SamplerBusy,
    TransientError,
    UserCodeError,
)
from schemas.events import Event, GroupGenerated, GroupsRequested, SampleGenerated
from schemas.ids import Purpose, group_stream
from schemas.learner import RULES, numbered_turns, requested_rows, turn_numbers
from schemas.sampling import (
    Message,
    RewardedTurn,
    SampleBatch,
    SampleFailure,
    SampleOutput,
    SampleRecord,
    SampleRequest,
    ToolSpec,
    Turn,
)
from schemas.specs import GroupSpec, SampleEntry
from tests.kit.decider import Given, given
from tests.kit.fakes import (
    Bench,
    FakeGateway,
    FakeSampler,
    FakeSession,
    FakeUserCode,
    Workflow,
    bench,
    turn,
)
from tests.kit.specs import entry, group_spec, ref, slots, template

PLAIN = group_spec(template())
WORKED = group_spec(template(workflow="Say", num_samples=3))
STREAM = group_stream(PLAIN.group)


def requested(spec: GroupSpec) -> GroupsRequested:
    return GroupsRequested(
        owner="r1", purpose=Purpose.TRAIN, step=1, slots=slots(3), template=spec.template
    )


def finished(index: int) -> SampleFinished:
    effect = GenerateSample(spec=WORKED, index=index)
    return SampleFinished(effect, artifact=ref(f"part {index}"), entry=entry(index))


def sampled() -> GroupSampled:
    effect = GenerateGroup(spec=PLAIN)
    return GroupSampled(effect, artifact=ref("group"), entries=(entry(0), entry(1)))


GENERATED = GroupGenerated(spec=PLAIN, entries=(entry(0), entry(1)), parts=(ref("group"),))


def generated(index: int) -> SampleGenerated:
    return SampleGenerated(spec=WORKED, entry=entry(index), artifact=ref(f"part {index}"))


def test_a_group_without_workflow_is_one_effect() -> None:
    given(CONSUMER).when(requested(PLAIN)).then(effects=[GenerateGroup(spec=PLAIN)])


def test_a_group_without_user_code_is_one_effect() -> None:
    bare = group_spec(template(user_code=False))
    given(CONSUMER).when(requested(bare)).then(effects=[GenerateGroup(spec=bare)])


def test_a_group_with_a_workflow_is_an_effect_per_sample() -> None:
    wanted = [GenerateSample(spec=WORKED, index=index) for index in range(3)]
    given(CONSUMER).when(requested(WORKED)).then(effects=wanted)


def test_every_slot_is_decided_on_its_own_stream() -> None:
    request = requested(PLAIN).model_copy(update={"slots": slots(3, 5, 1)})
    when = given(CONSUMER).when(request)
    assert list(when.decisions) == [group_stream(f"r1-train-1-{slot}-0") for slot in range(3)]
    assert when.effects == [GenerateGroup(spec=spec) for spec in request.group_specs()]


def test_a_request_asks_only_for_what_is_missing() -> None:
    when = given(CONSUMER, generated(1)).when(requested(WORKED))
    when.then(effects=[GenerateSample(spec=WORKED, index=index) for index in (0, 2)])


def test_a_request_for_a_finished_group_decides_nothing() -> None:
    given(CONSUMER, GENERATED).when(requested(PLAIN)).then_nothing()


def test_a_sampled_group_is_recorded_once() -> None:
    given(CONSUMER).when(sampled(), stream=STREAM).then(events=[GENERATED])
    given(CONSUMER, GENERATED).when(sampled(), stream=STREAM).then_nothing()


def test_a_finished_sample_is_recorded_once() -> None:
    given(CONSUMER).when(finished(1), stream=STREAM).then(events=[generated(1)])
    given(CONSUMER, generated(1)).when(finished(1), stream=STREAM).then_nothing()


def test_the_last_sample_brings_its_group() -> None:
    when = given(CONSUMER, generated(2), generated(0)).when(finished(1), stream=STREAM)
    group = GroupGenerated(
        spec=WORKED,
        entries=(entry(0), entry(1), entry(2)),
        parts=(ref("part 0"), ref("part 1"), ref("part 2")),
    )
    when.then(events=[generated(1), group])
    when.after().when(finished(1), stream=STREAM).then_nothing()


def test_a_sample_whose_workers_died_is_a_failed_entry_without_artifact() -> None:
    failed = Failed(GenerateSample(spec=WORKED, index=1), FailureCategory.CRASH, "died 20 times")
    when = given(CONSUMER, generated(0), generated(2)).when(failed, stream=STREAM)
    lost = entry(1, prompt_tokens=0, failure="crash", message="died 20 times")
    when.then(
        events=[
            SampleGenerated(spec=WORKED, entry=lost, artifact=None),
            GroupGenerated(
                spec=WORKED,
                entries=(entry(0), lost, entry(2)),
                parts=(ref("part 0"), ref("part 2")),
            ),
        ]
    )
    when.after().when(failed, stream=STREAM).then_nothing()


def test_a_group_that_cannot_be_generated_has_only_failed_entries() -> None:
    failed = Failed(GenerateGroup(spec=PLAIN), FailureCategory.INTERNAL, "engine gone")
    lost = [
        entry(i, prompt_tokens=0, failure="internal_error", message="engine gone") for i in (0, 1)
    ]
    when = given(CONSUMER).when(failed, stream=STREAM)
    when.then(events=[GroupGenerated(spec=PLAIN, entries=tuple(lost), parts=())])
    given(CONSUMER, GENERATED).when(failed, stream=STREAM).then_nothing()


@pytest.mark.parametrize("num_samples", [8, 64, 128])
def test_messages_of_a_whole_failed_group_fit_into_its_event(num_samples: int) -> None:
    spec = group_spec(template(workflow="Say", num_samples=num_samples))
    world = given(CONSUMER)
    for index in range(num_samples):
        effect = GenerateSample(spec=spec, index=index)
        failed = Failed(effect, FailureCategory.AGENT, 'Traceback: "\\\x07' * 1000)
        world = world.when(failed, stream=STREAM).after()
    assert isinstance(world.events[-1], GroupGenerated)


@holds_for(st.lists(st.sampled_from([0, 1, 2]), max_size=12))
def test_any_order_and_any_number_of_outcomes_ends_in_the_same_group(order: list[int]) -> None:
    world: Given = given(CONSUMER)
    for index in [*order, 0, 1, 2]:
        outcome: Outcome = finished(index)
        world = world.when(outcome, stream=STREAM).after()
    groups: list[Event] = [e for e in world.events if isinstance(e, GroupGenerated)]
    assert len(groups) == 1
    assert len(world.events) == 4
    assert isinstance(groups[0], GroupGenerated)
    assert [part.sha256 for part in groups[0].parts] == [ref(f"part {i}").sha256 for i in range(3)]


PROMPT = (Message(role="user", content="Say 3"),)
ROW = DatasetRow(prompt=PROMPT, label="the secret label", metadata={"level": 2})


async def batch_of(world: Bench, artifact: ArtifactRef) -> SampleBatch:
    return SampleBatch.model_validate_json(await world.ports.artifacts.get_artifact(artifact))


async def test_a_group_is_sampled_from_its_row(tmp_path: Path) -> None:
    sampler = FakeSampler(
        lambda request: turn(f"{request.key.sample}", cut=request.key.sample == 1)
    )
    world = bench(tmp_path, sampler=sampler)
    spec = group_spec(template(num_samples=3, dataset=await world.dataset(ROW)), row=0)
    outcome = await perform(GenerateGroup(spec=spec), world.ports)
    assert isinstance(outcome, GroupSampled)
    assert [request.key for request in sampler.requests] == [spec.draw_key(i) for i in range(3)]
    assert {request.messages for request in sampler.requests} == {PROMPT}
    samples = (await batch_of(world, outcome.artifact)).samples
    assert [sample.text for sample in samples] == ["0", "1", "2"]
    assert [sample.truncated for sample in samples] == [False, True, False]
    assert samples[0].messages == (*PROMPT, Message(role="assistant", content="0"))
    assert samples[0].sequences[0].loss_mask == (0, 0, 1)
    assert outcome.entries[0] == entry(0, completion_tokens=1, num_turns=1)


async def test_a_prompt_that_is_too_long_fails_its_sample_only(tmp_path: Path) -> None:
    def answer(request: SampleRequest) -> Turn:
        if request.key.sample == 0:
            raise UserCodeError(FailureCategory.PROMPT_TOO_LONG, "900 tokens; at most 64 fit")
        return turn("fine")

    world = bench(tmp_path, sampler=FakeSampler(answer))
    spec = group_spec(template(dataset=await world.dataset(ROW)), row=0)
    outcome = await perform(GenerateGroup(spec=spec), world.ports)
    assert isinstance(outcome, GroupSampled)
    assert [e.failure for e in outcome.entries] == ["prompt_too_long", None]
    assert outcome.entries[0].message == "900 tokens; at most 64 fit"
    assert (await batch_of(world, outcome.artifact)).samples[0].sequences == ()


async def test_an_engine_that_is_gone_is_no_fact_about_a_sample(tmp_path: Path) -> None:
    def answer(request: SampleRequest) -> Turn:
        raise TransientError("the engine has closed")

    world = bench(tmp_path, sampler=FakeSampler(answer))
    spec = group_spec(template(dataset=await world.dataset(ROW)), row=0)
    with pytest.raises(TransientError):
        await perform(GenerateGroup(spec=spec), world.ports)


async def worked(
    directory: Path,
    workflow: Workflow,
    *,
    sampler: FakeSampler | None = None,
    failed_rewards: dict[str, Any] | None = None,
    teacher_hint: str | None = None,
    rules: int = RULES,
) -> tuple[SampleRecord, SampleEntry, object]:
    """Run one sample of a workflow; return its record, its entry, and what the workflow
    received."""
    sampler = sampler or FakeSampler(lambda request: turn("unheard"))
    gateway = FakeGateway()
    user = FakeUserCode(gateway=gateway, workflow=workflow)
    world = bench(directory, sampler=sampler, gateway=gateway, user=user)
    of = template(workflow="Say", num_samples=1, dataset=await world.dataset(ROW))
    assert of.rollout is not None
    rollout = of.rollout.model_copy(update={"failed_rewards": failed_rewards or {}})
    given = {"rollout": rollout, "teacher_hint": teacher_hint, "rules": rules}
    of = of.model_copy(update=given)
    outcome = await perform(GenerateSample(spec=group_spec(of, row=0), index=0), world.ports)
    assert isinstance(outcome, SampleFinished)
    [session] = gateway.sessions.values()
    assert session.closed
    assert session.deadline_s == 450
    assert len(sampler.prepared) == 1
    [record] = (await batch_of(world, outcome.artifact)).samples
    return record, outcome.entry, user.seen_by_workflow


async def test_a_workflow_speaks_through_its_session_and_never_sees_the_label(
    tmp_path: Path,
) -> None:
    def workflow(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        reply = session.ask(prompt, "three")
        return WorkflowResult(messages=(*prompt, reply))

    record, written, seen = await worked(tmp_path, workflow)
    assert record.text == "three"
    assert record.failure is None
    assert written == entry(0, completion_tokens=5, num_turns=1)
    assert "r1-train-1-0-0.0" in repr(seen)
    assert "secret" not in repr(seen)


async def test_a_workflow_that_returns_nothing_leaves_the_gateways_record(tmp_path: Path) -> None:
    def workflow(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        session.ask(prompt, "three")
        return WorkflowResult(messages=None)

    record, _, _ = await worked(tmp_path, workflow)
    assert record.messages == (*PROMPT, Message(role="assistant", content="three"))


@pytest.mark.parametrize("texts", ["b", "bc"])
async def test_several_branches_are_kept_with_their_sample(tmp_path: Path, texts: str) -> None:
    branches = tuple((*PROMPT, Message(role="assistant", content=text)) for text in texts)

    def workflow(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        for text in texts:
            session.ask(prompt, text)
        session.branches = branches
        return WorkflowResult(messages=None)

    record, _, _ = await worked(tmp_path, workflow)
    assert record.branches == (branches if len(texts) > 1 else ())
    assert record.messages == branches[-1]
    assert record.conversations == (branches[-1], *branches[:-1])


ADD = ToolSpec(name="add", description="", parameters="{}")


@pytest.mark.parametrize(
    ("hint", "offered", "kept"),
    [
        ("h", ((ADD,), (ADD,), ()), ((ADD,), ())),
        ("h", ((), (), ()), ()),
        (None, ((ADD,), (ADD,), ()), ()),
    ],
)
async def test_the_tools_of_each_row_are_kept_where_a_teacher_reads_a_hint(
    tmp_path: Path,
    hint: str | None,
    offered: tuple[tuple[ToolSpec, ...], ...],
    kept: tuple[tuple[ToolSpec, ...], ...],
) -> None:
    def workflow(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        asked = turn("a", prompt=(1, 2))
        ids = (*asked.prompt_ids, *asked.completion_ids)
        session.ask(prompt, "")
        session.turns = [asked, turn("b", prompt=(*ids, 3)), turn("c", prompt=(4,))]
        session.tools, session.offered = offered[-1], offered
        return WorkflowResult(messages=None)

    record, _, _ = await worked(tmp_path, workflow, teacher_hint=hint)
    assert len(record.sequences) == 2
    assert record.row_tools == kept
    assert ("row_tools" in record.model_dump()) == bool(kept)


class EndsItsProcess:
    """A workflow that asks and then ends its process, which the fourth attempt says."""

    def __init__(self) -> None:
        self.sessions: list[FakeSession] = []

    def __call__(self, prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        session.ask(prompt, "half")
        self.sessions.append(session)
        if len(self.sessions) < 4:
            raise CallInterrupted("its process ended")
        raise UserCodeError(FailureCategory.AGENT, "its process ended whenever it ran alone")


async def test_a_worker_makes_a_sample_again_whose_process_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandboxes of two workers each saw it die too seldom. After five deaths it was a failure of the
    platform, which figures leave out, and which samples these were differed from run to run."""
    monkeypatch.setattr(interrupted_calls, "PAUSES_S", (0.0, 0.0, 0.0))
    workflow = EndsItsProcess()
    record, _, _ = await worked(tmp_path, workflow)
    assert record.failure is not None
    assert record.failure.category == FailureCategory.AGENT
    assert len({id(session) for session in workflow.sessions}) == 4
    assert all(session.closed for session in workflow.sessions)
    assert record.num_turns == 1, "of the last attempt"


async def test_twin_without_it_another_worker_may_make_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupted_calls, "PAUSES_S", ())
    with pytest.raises(TransientError):
        await worked(tmp_path, EndsItsProcess())


async def test_a_workflow_that_fails_is_data_and_nothing_of_it_is_trained(tmp_path: Path) -> None:
    def workflow(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        session.ask(prompt, "half")
        raise UserCodeError(FailureCategory.AGENT, "main.py:7: ZeroDivisionError")

    record, written, _ = await worked(tmp_path, workflow)
    assert (written.failure, written.message) == ("agent_error", "main.py:7: ZeroDivisionError")
    assert record.text == "half"
    assert record.sequences == ()
    record, written, _ = await worked(tmp_path, workflow, failed_rewards={"agent_error": -1.0})
    assert written.failure == "agent_error"
    assert len(record.sequences) == 1, "the run gives such samples a reward, so they are trained"


LEFT = UserOutput(stdout="hello", traceback="ValueError", files={"a.txt": b"kept"}, is_cut=True)


@pytest.mark.parametrize("raises", [False, True])
async def test_output_of_user_code_is_kept_with_its_sample(tmp_path: Path, raises: bool) -> None:
    def workflow(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        reply = session.ask(prompt, "three")
        if raises:
            raise UserCodeRaised(FailureCategory.AGENT, "ValueError", output=LEFT)
        return WorkflowResult((*prompt, reply), LEFT)

    record, _, _ = await worked(tmp_path, workflow)
    assert record.output is not None
    assert record.output.model_copy(update={"files": {}}) == SampleOutput(
        stdout="hello", traceback="ValueError", is_cut=True
    )
    assert record.output.files["a.txt"].sha256 == reference(b"kept").sha256
    assert (record.failure is not None) is raises


def test_the_event_of_a_sample_names_its_files() -> None:
    of = template(workflow="Say", num_samples=1)
    effect = GenerateSample(spec=group_spec(of), index=0)
    done = SampleFinished(effect, artifact=ref("sample"), entry=entry(0), files=(ref("a file"),))
    generated, _ = given(CONSUMER).when(done, stream=group_stream(effect.spec.group)).events
    assert isinstance(generated, SampleGenerated)
    assert generated.files == (ref("a file"),)


async def test_a_workflow_that_never_asks_has_failed(tmp_path: Path) -> None:
    record, written, _ = await worked(tmp_path, lambda prompt, _: WorkflowResult(tuple(prompt)))
    assert written.failure == "validation_error"
    assert record.failure is not None
    assert "sent no request to the policy" in record.failure.message


@pytest.mark.parametrize("waits", [False, True])
async def test_a_fault_of_the_platform_is_no_fact_about_a_sample(
    tmp_path: Path, waits: bool
) -> None:
    """It is not counted as an attempt either where the sampler waits for another worker."""

    def interrupted(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        session.interrupted, session.waits_for_sampler = True, waits
        raise UserCodeError(FailureCategory.AGENT, "the policy endpoint answered 503")

    with pytest.raises(TransientError) as raised:
        await worked(tmp_path, interrupted)
    assert isinstance(raised.value, SamplerBusy) == waits


async def test_a_workflow_that_raises_on_a_refusal_failed_because_of_it(tmp_path: Path) -> None:
    """Twins: without a refusal the workflow is to blame, and another failure stays what it is."""
    refusal = SampleFailure(category=FailureCategory.PROVIDER, message="no such model")

    def asking(category: FailureCategory, refused: SampleFailure | None) -> Any:
        def workflow(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
            session.refusal = refused
            raise UserCodeError(category, "main.py:7: it raised")

        return workflow

    for category, refused, told in (
        (FailureCategory.AGENT, refusal, "provider_error"),
        (FailureCategory.AGENT, None, "agent_error"),
        (FailureCategory.TIMEOUT, refusal, "timeout"),
    ):
        _, written, _ = await worked(tmp_path, asking(category, refused))
        assert written.failure == told

    def silent(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        session.refusal = refusal
        return WorkflowResult(tuple(prompt))

    _, written, _ = await worked(tmp_path, silent)
    assert (written.failure, written.message) == ("provider_error", "no such model")


class Unprepared(FakeSampler):
    """A sampler that cannot be sampled from, for this reason."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(lambda request: turn("unheard"))
        self.reason = reason

    async def prepare(self, request: SampleRequest) -> None:
        await super().prepare(request)
        raise self.reason


async def test_a_workflow_s_time_begins_once_its_policy_can_be_sampled_from(tmp_path: Path) -> None:
    """Twin: when there is nothing to wait for, the same workflow runs to its end."""
    begun: list[bool] = []

    def workflow(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        begun.append(True)
        return WorkflowResult((*prompt, session.ask(prompt, "5")))

    with pytest.raises(TransientError, match="no server is there"):
        await worked(tmp_path, workflow, sampler=Unprepared(TransientError("no server is there")))
    assert not begun
    await worked(tmp_path, workflow)
    assert begun


async def test_a_refusal_of_the_sampler_reaches_the_workflow(tmp_path: Path) -> None:
    def workflow(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        raise UserCodeError(FailureCategory.AGENT, "the policy endpoint answered 400: too large")

    _, written, _ = await worked(tmp_path, workflow, sampler=Unprepared(Refused("too large")))
    assert written.message == "the policy endpoint answered 400: too large"


def asks_three_times(credit: Credit) -> Workflow:
    """The third answer begins a new row, because the history is rewritten."""

    def workflow(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        for text in ("a", "bcd", "ef"):
            session.ask(prompt, text)
        return WorkflowResult(None, credit=credit)

    return workflow


async def test_rewards_of_turns_are_kept_with_the_place_of_each_turn(tmp_path: Path) -> None:
    record, written, _ = await worked(
        tmp_path, asks_three_times(Credit(turn_rewards={2: 0.5, 0: -1.0}))
    )
    assert [turn.reward for turn in record.turns] == [-1.0, None, 0.5]
    assert written.num_turns == 3
    for number, row in enumerate(record.sequences):
        of_row = [turn.num_actions for turn in record.turns if turn.row == number]
        assert sum(of_row) == sum(row.loss_mask) > 0
    again, _, _ = await worked(tmp_path / "again", asks_three_times(Credit()))
    assert again.turns == ()
    assert "turns" not in again.model_dump()


PROMPTS = ((1,), (1, 65, 2), (1, 65, 3), (7, 7))
"""The second and the third go on from the answer to the first, which is `A` (65)."""


def arrives(order: Sequence[int]) -> Workflow:
    """Four requests that are answered in this order. The reward of each names it."""

    def workflow(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        session.turns += [turn("A", prompt=PROMPTS[number]) for number in order]
        credit = Credit(turn_rewards={place: float(number) for place, number in enumerate(order)})
        return WorkflowResult((*prompt, Message(role="assistant", content="A")), credit=credit)

    return workflow


ARRIVALS = [
    order for order in permutations(range(4)) if order.index(0) < min(map(order.index, (1, 2)))
]


async def test_rows_do_not_depend_on_which_open_request_arrives_first(tmp_path: Path) -> None:
    """Twin: before rules 7 they have the order of arrival."""
    found = []
    for rules in (RULES, 6):
        records = [
            (await worked(tmp_path / f"{rules}-{n}", arrives(order), rules=rules))[0]
            for n, order in enumerate(ARRIVALS)
        ]
        assert all(len(record.sequences) == 3 for record in records)
        found.append({(record.sequences, _unnumbered(record)) for record in records})
    assert len(ARRIVALS) == 8
    assert [len(one) for one in found] == [1, 8]


def _unnumbered(record: SampleRecord) -> tuple[RewardedTurn, ...]:
    """The turns of a sample without their numbers, which are those of their requests."""
    return tuple(turn.model_copy(update={"number": None}) for turn in record.turns)


async def test_turns_in_rows_of_another_order_keep_the_numbers_of_their_requests(
    tmp_path: Path,
) -> None:
    """The second request does not go on from the first, and its tokens come before those of it."""
    record, _, _ = await worked(tmp_path, arrives((3, 0, 2)))
    assert [row.tokens[:2] for row in record.sequences] == [(1, 65), (7, 7)]
    assert [turn.row for turn in record.turns] == [0, 0, 1]
    assert turn_numbers(record) == (1, 2, 0)
    by_number = numbered_turns(record)
    assert [(number, turn.reward) for number, turn in by_number.items()] == [
        (0, 3.0),
        (1, 0.0),
        (2, 2.0),
    ]
    shown = [{"turn": n, "agent": None, "reward": r} for n, r in ((0, 3.0), (1, 0.0), (2, 2.0))]
    assert rewarded_turns(record) == shown
    again = SampleRecord.model_validate_json(record.model_dump_json())
    assert again.turns == record.turns
    in_order, _, _ = await worked(tmp_path / "again", arrives((0, 2, 3)))
    assert "number" not in in_order.model_dump_json()


@pytest.mark.parametrize(("order", "rows"), [((3, 0, 2), (1, 0)), ((0, 2, 3), (0, 1))])
async def test_rows_can_be_put_in_the_order_of_their_requests(
    tmp_path: Path, order: tuple[int, ...], rows: tuple[int, ...]
) -> None:
    """Also without rewards of turns. A sample that is in that order records no turns."""

    def workflow(prompt: Sequence[Message], session: FakeSession) -> WorkflowResult:
        return WorkflowResult(arrives(order)(prompt, session).messages)

    record, _, _ = await worked(tmp_path, workflow)
    assert requested_rows(record) == rows
    assert bool(record.turns) == (rows != (0, 1))
    assert rewarded_turns(record) == []


async def test_agents_are_kept_with_their_turns_and_rewards(tmp_path: Path) -> None:
    said = Credit(turn_agents={0: "solver", 2: "critic"}, agent_rewards={"critic": 0.5})
    record, _, _ = await worked(tmp_path, asks_three_times(said))
    assert [turn.agent for turn in record.turns] == ["solver", None, "critic"]
    assert record.agent_rewards == {"critic": 0.5}
    written = record.model_dump()
    assert "agent" not in written["turns"][1]
    again, _, _ = await worked(tmp_path / "again", asks_three_times(Credit()))
    assert {"turns", "agent_rewards"} & set(again.model_dump()) == set()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            Credit(turn_agents={3: "solver"}),
            "set an agent for turn 3, but 3 requests were answered",
        ),
        (
            Credit(turn_agents={0: "solver"}, agent_rewards={"sovler": 1.0}),
            "a reward for agent 'sovler', which has no turn; call ctx.set_turn_agent",
        ),
    ],
)
async def test_an_agent_without_an_answer_fails_the_sample(
    tmp_path: Path, said: Credit, message: str
) -> None:
    record, written, _ = await worked(tmp_path, asks_three_times(said))
    assert written.failure == "validation_error"
    assert record.failure is not None
    assert message in record.failure.message
    assert (record.turns, record.agent_rewards) == ((), {})


async def test_a_reward_for_a_turn_that_does_not_exist_fails_the_sample(tmp_path: Path) -> None:
    record, written, _ = await worked(
        tmp_path, asks_three_times(Credit(turn_rewards={1: 0.5, 3: 1.0}))
    )
    assert written.failure == "validation_error"
    assert record.failure is not None
    assert "a reward for turn 3, but 3 requests were answered" in record.failure.message
    assert record.sequences == ()
    assert record.turns == ()
