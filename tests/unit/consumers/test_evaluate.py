"""The evaluate consumer runs every row once, in chunks, and its result counts failures as
failures."""

from uuid import UUID

import pytest

from consumers.evaluate import CONSUMER
from schemas.config import EvalConfig
from schemas.events import (
    MAX_EVENT_BYTES,
    EvaluationCompleted,
    EvaluationRequested,
    EvaluationRetryRequested,
    EvaluationStarted,
    EvaluationStopRequested,
    GroupGraded,
    GroupsRequested,
    GroupsSettled,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.ids import eval_stream
from schemas.sampling import Grade, ModelRef, ProviderRef
from schemas.specs import DiscoveredRollout, Entrypoint, GroupSpec, PackageEnvironment, SampleEntry
from tests.kit.decider import Given, given
from tests.kit.specs import ref, template

CONFIG = EvalConfig.model_validate(
    {
        "experiment": {
            "rollout": "say",
            "entrypoint": "main.py",
            "model_path": "m",
            "dataset": "sums",
        },
        "advanced": {"network": ("a.example.com:443",)},
    }
)


def requested(
    *,
    rows: int = 5,
    chunk: int = 2,
    run: str | None = None,
    n: int = 1,
    provider: ProviderRef | None = None,
) -> EvaluationRequested:
    shape = template(num_samples=n)
    if provider is not None:
        model = ModelRef(kind="provider", name=provider.name, provider=provider)
        shape = shape.model_copy(update={"model": model})
    return EvaluationRequested(
        evaluation="e1",
        eval_name="e1",
        template=shape,
        rows=tuple(range(rows)),
        batch_size=chunk,
        pass_threshold=1.0,
        run=run,
        step=4 if run else None,
        config=None if run else CONFIG,
        workspace=None if run else "w1",
    )


CHOSEN = PackageEnvironment(key="e" * 64, lock=ref("pins"), python="3.12", platform="linux-x86_64")
SYNCED = WorkspaceSynced(
    workspace="w1",
    request=UUID(int=1),
    commit="c" * 40,
    snapshot=ref("tree"),
    rollouts=(
        DiscoveredRollout(
            entrypoint=Entrypoint(rollout="say"),
            workflow="Say",
            grader="Count",
            environment=CHOSEN,
        ),
    ),
    requester=eval_stream("e1"),
)


def graded(spec: GroupSpec, reward: float | None = 1.0, failure: str | None = None) -> GroupGraded:
    return GroupGraded(
        spec=spec,
        artifact=ref(spec.group),
        entries=(SampleEntry(index=0, failure=failure, message=failure, completion_tokens=2),),
        grades=(Grade(index=0, reward=reward),),
    )


def graded_with(spec: GroupSpec, *rewards: float | None, usd: float | None = None) -> GroupGraded:
    """A group whose samples have these rewards. None: the platform failed."""
    failed = [None if reward is not None else "internal_error" for reward in rewards]
    return GroupGraded(
        spec=spec,
        artifact=ref(spec.group),
        entries=tuple(
            SampleEntry(index=i, failure=why, message=why, completion_tokens=2, usd=usd)
            for i, why in enumerate(failed)
        ),
        grades=tuple(Grade(index=i, reward=reward) for i, reward in enumerate(rewards)),
    )


def answer(world: Given, rewards: dict[int, tuple[float | None, ...]]) -> Given:
    """The evaluation after every group that it requests was graded: the rewards by slot."""
    done = sum(isinstance(e, GroupsSettled) for e in world.events)
    while True:
        asked = [e for e in world.events if isinstance(e, GroupsRequested)]
        specs = [spec for event in asked for spec in event.group_specs()]
        if done == len(specs):
            return world
        world = world.when(graded_with(specs[done], *rewards[specs[done].group_key.slot])).after()
        done += 1


def last(world: Given) -> EvaluationCompleted:
    event = world.events[-1]
    assert isinstance(event, EvaluationCompleted)
    return event


def retried(world: Given, number: int = 1) -> Given:
    """The evaluation after a request to repeat what has no reward, and the decision on it."""
    retry = EvaluationRetryRequested(evaluation="e1", number=number)
    return Given(CONSUMER, (*world.events, retry)).when(retry).after()


def begun(request: EvaluationRequested) -> Given:
    """An evaluation whose workspace has arrived and whose first chunk is requested."""
    return given(CONSUMER, request).when(SYNCED).after()


def test_it_waits_for_its_workspace_and_asks_for_the_first_chunk() -> None:
    given(CONSUMER).when(requested()).then_nothing()
    said = given(CONSUMER, requested()).when(SYNCED).then_types(EvaluationStarted, GroupsRequested)
    asked = said.events[1]
    assert isinstance(asked, GroupsRequested)
    assert [slot.row for slot in asked.slots] == [0, 1]
    assert asked.template.rollout is not None
    assert asked.template.rollout.network == ("a.example.com:443",)
    assert asked.template.rollout.environment == CHOSEN
    said.after().when(SYNCED).then_nothing()


def test_a_runs_validation_starts_at_once() -> None:
    said = given(CONSUMER).when(requested(run="r1")).then_types(EvaluationStarted, GroupsRequested)
    assert said.events[1].stream == eval_stream("e1")
    said.after().when(requested(run="r1")).then_nothing()


def test_an_evaluation_ends_with_the_mean_over_all_graded_samples() -> None:
    world, rewards = begun(requested()), iter([1.0, 0.0, 1.0, None, 1.0])
    while True:
        asked = [e for e in world.events if isinstance(e, GroupsRequested)][-1]
        for spec in asked.group_specs():
            said = world.when(graded(spec, next(rewards)))
            world = said.after()
            world.when(graded(spec, 0.0)).then_nothing()
        if isinstance(said.events[-1], EvaluationCompleted):
            break
        said.then_types(GroupsSettled, GroupsRequested)
    done = said.events[-1]
    assert isinstance(done, EvaluationCompleted)
    assert (done.status, done.reward) == ("finished", 0.75)
    assert done.metrics["eval/pass_rate"] == 0.75
    assert done.metrics["eval/left_out"] == 1
    assert done.metrics["eval/count"] == 5


def test_a_chunk_of_any_size_fits_into_its_events() -> None:
    asked = begun(requested(rows=5000, chunk=5000)).events
    requests = [event for event in asked if isinstance(event, GroupsRequested)]
    assert [slot.row for event in requests for slot in event.slots] == list(range(5000))
    assert len({event.name for event in requests}) == len(requests)
    assert max(len(event.model_dump_json().encode()) for event in requests) < MAX_EVENT_BYTES / 2


def test_an_evaluation_whose_samples_all_fail_quotes_the_first_error() -> None:
    world = begun(requested(rows=1))
    (asked,) = [e for e in world.events if isinstance(e, GroupsRequested)]
    (spec,) = asked.group_specs()
    done = world.when(graded(spec, None, "agent_error")).events[-1]
    assert isinstance(done, EvaluationCompleted)
    assert done.status == "failed"
    assert "agent_error" in (done.message or "")


def test_a_failed_sync_or_a_stop_ends_the_evaluation() -> None:
    rejected = WorkspaceRejected(
        workspace="w1", request=UUID(int=1), message="no such branch", requester=eval_stream("e1")
    )
    (done,) = given(CONSUMER, requested()).when(rejected).events
    assert isinstance(done, EvaluationCompleted)
    assert (done.status, done.message) == ("failed", "no such branch")
    world = begun(requested())
    (stopped,) = world.when(EvaluationStopRequested(evaluation="e1")).events
    assert isinstance(stopped, EvaluationCompleted)
    assert stopped.status == "stopped"
    after = Given(CONSUMER, (*world.events, stopped))
    (asked,) = [e for e in world.events if isinstance(e, GroupsRequested)]
    after.when(graded(asked.group_specs()[0])).then_nothing()


def test_training_groups_are_not_for_it() -> None:
    spec = GroupSpec(group="r1-train-1-0-0", row=0, template=template())
    assert CONSUMER.routes(graded(spec)) == ()


ROWS: dict[int, tuple[float | None, ...]] = {
    0: (1.0, None, 0.0),
    1: (1.0, 1.0, 1.0),
    2: (None,) * 3,
}


def test_a_retry_requests_the_missing_attempts_only_and_merges_their_rewards() -> None:
    world = answer(begun(requested(rows=3, n=3)), ROWS)
    assert last(world).metrics["eval/left_out"] == 4
    before = len(world.events)
    world = retried(world)
    asked = [e for e in world.events[before:] if isinstance(e, GroupsRequested)]
    assert [
        (slot.slot, slot.replacement, slot.row, slot.attempts, event.template.num_samples)
        for event in asked
        for slot in event.slots
    ] == [(0, 1, 0, (1,), 1), (2, 1, 2, (), 3)]
    world = answer(world, {0: (1.0,), 2: (0.0, None, 1.0)})
    done = last(world)
    assert (done.status, done.message) == ("finished", None)
    assert done.metrics["eval/left_out"] == 1
    assert done.reward == (1 + 1 + 0 + 3 + 0 + 1) / 8
    assert done.metrics["eval/tokens"] == 2 * (9 + 4)
    world = answer(retried(world, 2), {2: (1.0,)})
    assert last(world).metrics["eval/left_out"] == 0
    assert last(world).metrics["eval/pass@2"] == (1.0 + 1.0 + 1.0) / 3


def test_the_result_of_retries_equals_that_of_an_evaluation_in_which_nothing_failed() -> None:
    whole = {0: (1.0, 1.0, 0.0), 1: (1.0, 1.0, 1.0), 2: (0.0, 0.0, 1.0)}
    once = last(answer(begun(requested(rows=3, n=3)), dict(whole)))
    world = answer(retried(answer(begun(requested(rows=3, n=3)), ROWS)), {0: (1.0,), 2: whole[2]})
    again = last(world)
    same = {"eval/tokens"} ^ once.metrics.keys()
    assert {k: again.metrics[k] for k in same} == {k: once.metrics[k] for k in same}
    assert again.reward == once.reward


def crash(spec: GroupSpec, *rewards: float | None) -> GroupGraded:
    """A group whose policy crashed its workflow in the attempts without a reward."""
    group = graded_with(spec, *rewards)
    entries = (
        entry.model_copy(update={"failure": entry.failure and "agent_error"})
        for entry in group.entries
    )
    return group.model_copy(update={"entries": tuple(entries)})


def test_a_policy_that_crashes_on_half_of_its_rows_passes_at_most_half() -> None:
    """Given four rows with four attempts each, of which two crash in every attempt and one in half of
    them, pass@1 and pass@4 are over the same four rows, and nothing is repeated by a retry."""
    world = begun(requested(rows=4, chunk=4, n=4))
    rows = {0: (None,) * 4, 1: (1.0, None, 1.0, None), 2: (None,) * 4, 3: (1.0,) * 4}
    (asked,) = [e for e in world.events if isinstance(e, GroupsRequested)]
    for spec in asked.group_specs():
        world = world.when(crash(spec, *rows[spec.group_key.slot])).after()
    done = last(world)
    assert done.status == "finished"
    assert done.reward == done.metrics["eval/pass@1"] == (0 + 0.5 + 0 + 1) / 4
    assert done.metrics["eval/pass@4"] == (0 + 1 + 0 + 1) / 4
    assert (done.metrics["eval/failed"], done.metrics["eval/left_out"]) == (10, 0)
    assert done.metrics["eval/rows"] == 4
    assert done.metrics["eval/reward/low"] < done.reward < done.metrics["eval/reward/high"]
    again = retried(world)
    assert not [e for e in again.events[len(world.events) :] if isinstance(e, GroupsRequested)]
    assert last(again).metrics == done.metrics


def test_a_policy_that_always_crashes_has_the_reward_0_and_says_why() -> None:
    world = begun(requested(rows=1))
    (asked,) = [e for e in world.events if isinstance(e, GroupsRequested)]
    done = last(world.when(crash(asked.group_specs()[0], None)).after())
    assert (done.status, done.reward) == ("failed", 0.0)
    assert "agent_error" in (done.message or "")


def test_a_retry_is_decided_on_once_and_late_groups_change_nothing() -> None:
    world = answer(begun(requested(rows=3, n=3)), ROWS)
    first = next(e for e in world.events if isinstance(e, GroupsRequested)).group_specs()[0]
    retry = EvaluationRetryRequested(evaluation="e1", number=1)
    world = retried(world)
    world.when(retry).then_nothing()
    world.when(graded_with(first, 0.0, 0.0, 0.0)).then_nothing()
    world = answer(world, {0: (1.0,), 2: (1.0, 1.0, 1.0)})
    world.when(retry).then_nothing()


def test_a_retry_of_a_stopped_evaluation_requests_the_rows_that_were_left() -> None:
    world = begun(requested(rows=3, chunk=1))
    world = world.when(EvaluationStopRequested(evaluation="e1")).after()
    assert last(world).status == "stopped"
    world = answer(retried(world), {0: (1.0,), 1: (0.0,), 2: (1.0,)})
    assert last(world).metrics["eval/count"] == 3
    assert last(world).status == "finished"


def test_a_retry_without_anything_to_repeat_ends_with_the_same_figures() -> None:
    world = answer(begun(requested(rows=1)), {0: (1.0,)})
    again = retried(world)
    assert last(again).metrics == last(world).metrics
    given(CONSUMER, requested()).when(
        EvaluationRetryRequested(evaluation="e1", number=1)
    ).then_nothing()


def test_a_retry_of_many_attempts_fits_into_its_events() -> None:
    world = begun(requested(rows=300, chunk=300, n=64))
    world = answer(world, dict.fromkeys(range(300), (1.0, *(None,) * 63)))
    before = len(world.events)
    asked = [e for e in retried(world).events[before:] if isinstance(e, GroupsRequested)]
    assert [slot.slot for event in asked for slot in event.slots] == list(range(300))
    assert max(len(event.model_dump_json().encode()) for event in asked) < MAX_EVENT_BYTES / 2


def test_it_ends_when_the_money_is_spent() -> None:
    provider = ProviderRef(name="p/m", model="m", base_url="https://p/v1", max_usd=0.3)
    world = begun(requested(rows=4, chunk=1, provider=provider))
    for cost in (0.1, 0.2):
        asked = [e for e in world.events if isinstance(e, GroupsRequested)][-1]
        world = world.when(graded_with(asked.group_specs()[0], 1.0, usd=cost)).after()
    done = last(world)
    assert done.status == "failed"
    assert "advanced.max_usd is 0.3" in (done.message or "")
    assert done.metrics["eval/usd"] == pytest.approx(0.3)
