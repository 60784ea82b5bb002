"""Performing learner steps: which artifacts are stored, and how a learner that lost a version gets
it back."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from consumers.learn.consumer import CONSUMER, LearnPorts, perform
from consumers.learn.replay import build_step_batch, job_of, read_learned_rows
from infra.spine.runtime.consumer import AnyConsumer, Incoming, Meta
from schemas.datasets import DatasetRow, Trajectory
from schemas.effects import Effect, InitializePolicy, PolicyBuilt, TrainStep
from schemas.errors import CorruptData, NotFound, Refused, ReplayDiverged, TransientError
from schemas.events import BatchAssembled, Event, PolicyInitialized, PolicyUpdated, RunStarted
from schemas.ids import StreamName
from schemas.learner import Conversation, Preference
from schemas.sampling import Message as ChatMessage
from schemas.sampling import SampleBatch, SampleRecord
from schemas.sampling import Sequence as Tokens
from schemas.specs import BatchGroup, Plan, StateRef, TrainSpec
from tests.kit.decider import NOW
from tests.kit.fakes import FakeLearner, bench, damage
from tests.kit.specs import train_spec

STREAM = StreamName("policy-r1")
SPARSE = train_spec(advanced={"state_interval": 4})
"""Every fourth version is stored whole."""


def test_a_log_that_names_no_rules_is_of_the_first() -> None:
    old = SPARSE.model_dump()
    del old["rules"]
    assert job_of(TrainSpec.model_validate(old)).rules == 1
    assert job_of(SPARSE.model_copy(update={"rules": 2})).rules == 2


class Run:
    """A run of this consumer alone, which is decided, performed and recorded as the runtime would
    do it."""

    def __init__(self, directory: Path, spec: TrainSpec = SPARSE) -> None:
        self.spec = spec
        self.learner = FakeLearner()
        self.bench = bench(directory, learner=self.learner)

    async def start(self) -> "Run":
        plan = Plan(total_steps=9, batch_size=1, num_samples=2, num_rows=8)
        started = RunStarted(run="r1", plan=plan, spec=self.spec)
        [effect] = await self.decide(started, await self.bench.record(started))
        await self.perform(effect)
        return self

    async def take(self, *steps: int) -> None:
        for step in steps:
            await self.perform(await self.asked(step))

    async def asked(self, step: int) -> TrainStep:
        """Assemble the batch of a step and return the effect that takes the step."""
        batch = await self.batch(step)
        [effect] = await self.decide(batch, await self.bench.record(batch))
        assert isinstance(effect, TrainStep)
        return effect

    async def batch(self, step: int) -> BatchAssembled:
        if self.spec.config.advanced.algorithm == "sft":
            return BatchAssembled(run="r1", step=step, rows=(1, 0))
        groups = [await self.group(step, slot) for slot in (1, 0)]
        return BatchAssembled(run="r1", step=step, groups=tuple(groups))

    async def group(self, step: int, slot: int) -> BatchGroup:
        row = Tokens(tokens=(1, step, slot), loss_mask=(0, 1, 1), logprobs=(0.0, -0.5, -0.5))
        samples = tuple(SampleRecord(index=i, sequences=(row,)) for i in (0, 1))
        data = SampleBatch(group=f"r1-train-{step}-{slot}-0", samples=samples).model_dump_json()
        artifact = await self.bench.ports.artifacts.put_artifact(data.encode(), run="r1")
        return BatchGroup(slot=slot, replacement=0, artifact=artifact, rewards=(1.0, None))

    async def perform(self, effect: Effect) -> PolicyBuilt:
        assert isinstance(effect, InitializePolicy | TrainStep)
        outcome = await build(effect, self.bench.ports)
        await self.decide(outcome, effect.id)
        return outcome

    async def decide(self, message: Incoming, cause: UUID) -> Sequence[Effect]:
        consumer: AnyConsumer = CONSUMER
        state = consumer.initial
        for recorded in self.bench.world.events:
            if recorded.stream == STREAM:
                state = consumer.evolve(state, recorded.event)
        meta = Meta(event_id=cause, stream=STREAM, correlation=cause, now=NOW)
        decision = consumer.handle(state, message, meta)
        for event in decision.events:
            await self.bench.record(event)
        return decision.effects

    def dies(self, *, drift: str = "") -> FakeLearner:
        """End the process; the next one has a learner that holds nothing."""
        self.learner = FakeLearner(drift=drift)
        self.bench.ports = replace(self.bench.ports, learner=self.learner)
        return self.learner

    def versions(self) -> list[StateRef]:
        events = [recorded.event for recorded in self.bench.world.events]
        return [e.state for e in events if isinstance(e, PolicyInitialized | PolicyUpdated)]

    def edit(self, event: Event, **changes: Any) -> None:
        """Make another log in which one event is different."""
        events = self.bench.world.events
        at = next(i for i, recorded in enumerate(events) if recorded.event == event)
        events[at] = replace(events[at], payload=event.model_copy(update=changes))


async def test_version_0_is_stored_whole_with_the_files_of_its_checkpoints(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    [event] = [r.event for r in run.bench.world.events if isinstance(r.event, PolicyInitialized)]
    assert event.state.durable
    assert event.weights_name == "weights.safetensors"
    assert await run.bench.ports.artifacts.get_artifact(event.files["adapter_config.json"]) == b"{}"


async def test_steps_follow_on_each_other_without_loading(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    await run.take(1, 2, 3)
    assert run.learner.calls == ["initialize", "step 1", "step 2", "step 3"]


async def test_samplers_get_every_version_and_recovery_every_fourth(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    await run.take(1, 2, 3, 4)
    assert [version.weights is not None for version in run.versions()] == [True] * 5
    assert [version.state is not None for version in run.versions()] == [True, *[False] * 3, True]


async def test_a_new_learner_loads_the_newest_whole_version_and_replays(tmp_path: Path) -> None:
    calm, killed = await Run(tmp_path / "a").start(), await Run(tmp_path / "b").start()
    await calm.take(1, 2, 3, 4, 5, 6, 7)
    await killed.take(1, 2, 3, 4, 5, 6)
    learner = killed.dies()
    await killed.take(7)
    assert learner.calls == ["load 4", "step 5", "step 6", "step 7"]
    assert hashes(killed) == hashes(calm)


def hashes(run: Run) -> list[tuple[str, str]]:
    return [(version.weights_sha256, version.state_sha256) for version in run.versions()]


async def test_a_whole_base_needs_no_replay(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    await run.take(1, 2, 3, 4)
    learner = run.dies()
    await run.take(5)
    assert learner.calls == ["load 4", "step 5"]


async def test_skipped_steps_are_no_steps_of_the_learner(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    await run.take(1, 2, 5)
    learner = run.dies()
    await run.take(6)
    assert learner.calls == ["load 0", "step 1", "step 2", "step 3", "step 4"]
    assert [version.step for version in run.versions()] == [0, 1, 2, 5, 6]


async def test_other_bits_end_the_run_and_name_the_step(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    await run.take(1, 2)
    run.dies(drift="another torch")
    with pytest.raises(ReplayDiverged, match="step 1, taken again, gave other weights"):
        await run.take(3)


async def test_a_run_that_allows_it_goes_on_as_a_fork_that_is_stored_whole(tmp_path: Path) -> None:
    allowed = train_spec(advanced={"state_interval": 4, "allow_divergence": True})
    run = await Run(tmp_path, allowed).start()
    await run.take(1, 2)
    run.dies(drift="another torch")
    await run.take(3, 4, 5)
    learner = run.dies(drift="another torch")
    await run.take(6)
    updates = [r.event for r in run.bench.world.events if isinstance(r.event, PolicyUpdated)]
    forks = {update.step: update.fork for update in updates if update.fork}
    assert list(forks) == [3]
    assert "step 1, taken again, gave other weights" in forks[3]
    assert (updates[2].state.durable, updates[2].pinned) == (True, True)
    assert learner.calls == ["load 4", "step 5", "step 6"]


async def test_other_optimizer_bits_are_seen_too(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    await run.take(1, 2)
    run.dies()
    first = next(e.event for e in run.bench.world.events if isinstance(e.event, PolicyUpdated))
    run.edit(first, state=first.state.model_copy(update={"state_sha256": "0" * 64}))
    with pytest.raises(ReplayDiverged, match="step 1, taken again, gave other state"):
        await run.take(3)


async def build(effect: InitializePolicy | TrainStep, ports: LearnPorts) -> PolicyBuilt:
    outcome = await perform(effect, ports)
    assert isinstance(outcome, PolicyBuilt)
    return outcome


async def test_a_step_performed_twice_makes_the_same_version(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    effect = await run.asked(1)
    first, second = [await build(effect, run.bench.ports) for _ in range(2)]
    assert first.state == second.state
    assert first.plan == second.plan
    assert run.learner.calls == ["initialize", "step 1", "load 0", "step 1"]


async def test_a_log_that_does_not_show_the_base_yet_is_read_again(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    await run.take(1)
    effect = await run.asked(2)
    run.dies()
    run.bench.world.events = [
        recorded for recorded in run.bench.world.events if recorded.stream != STREAM
    ]
    with pytest.raises(TransientError, match="does not show version 1"):
        await perform(effect, run.bench.ports)


async def test_a_log_that_does_not_show_all_batches_yet_is_read_again(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    await run.take(1)
    effect = await run.asked(2)
    run.dies()
    run.bench.world.events = [
        r for r in run.bench.world.events if not isinstance(r.event, BatchAssembled)
    ]
    with pytest.raises(TransientError, match="does not show all batches"):
        await perform(effect, run.bench.ports)


async def test_the_batch_is_in_slot_order_with_its_rewards(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    effect = await run.asked(1)
    assert [group.slot for group in effect.groups] == [1, 0]
    straight = effect.model_copy(update={"groups": effect.groups[::-1]})
    first, second = [await build(e, run.bench.ports) for e in (effect, straight)]
    assert first.state.weights_sha256 == second.state.weights_sha256


async def test_a_damaged_group_is_never_trained_on(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    effect = await run.asked(1)
    damage(effect.groups[0].artifact.uri)
    with pytest.raises(CorruptData):
        await perform(effect, run.bench.ports)


async def test_versions_that_nobody_needs_any_more_are_collected(tmp_path: Path) -> None:
    run = await Run(tmp_path, train_spec(advanced={"state_interval": 1})).start()
    await run.take(1, 2, 3, 4, 5)
    get = run.bench.ports.artifacts.get_artifact
    for version in run.versions():
        for ref in (version.weights, version.state):
            assert ref is not None
            if version.step not in (1, 2):
                await get(ref)
                continue
            with pytest.raises(NotFound):
                await get(ref)


async def test_time_is_measured(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    outcome = await run.perform(await run.asked(1))
    assert outcome.metrics == {"train/loss": 0.5, "time/learn_s": 0.0, "time/publish_s": 0.0}


def row(text: str, label: str | None) -> DatasetRow:
    return DatasetRow(prompt=(ChatMessage(role="user", content=text),), label=label)


async def sft(directory: Path, *rows: DatasetRow) -> Run:
    run = Run(directory)
    dataset = await run.bench.dataset(*rows)
    run.spec = train_spec(dataset=dataset, advanced={"algorithm": "sft", "state_interval": 4})
    return await run.start()


async def test_sft_learns_the_labels_of_its_rows_and_stores_only_whole_versions(
    tmp_path: Path,
) -> None:
    run = await sft(tmp_path, row("1+1?", "2"), row("2+2?", "4"))
    await run.take(1, 2, 3, 4)
    stored = [(v.weights is not None, v.state is not None) for v in run.versions()]
    assert stored == [(True, True), *[(False, False)] * 3, (True, True)]
    learner = run.dies()
    await run.take(5)
    assert learner.calls == ["load 4", "step 5"]


async def test_the_held_out_loss_is_measured_before_between_and_after(tmp_path: Path) -> None:
    """The loss is measured for nine steps with an interval of four; replayed steps are not measured
    again."""
    run = Run(tmp_path)
    rows = [row("1+1?", "2"), row("2+2?", "4")]
    dataset = await run.bench.dataset(*rows)
    held_out = await run.bench.dataset(*rows, row("3+3?", "6"))
    spec = train_spec(
        dataset=dataset, checkpoints={"eval_interval": 4}, advanced={"algorithm": "sft"}
    )
    run.spec = spec.model_copy(update={"validation": held_out})
    await run.start()
    first = [r.event for r in run.bench.world.events if isinstance(r.event, PolicyInitialized)]
    assert [event.metrics for event in first] == [{"eval/validation/loss": 3.0}]
    await run.take(1, 2, 3)
    outcome = await run.perform(await run.asked(4))
    assert outcome.metrics["eval/validation/loss"] == 3.0
    learner = run.dies()
    await run.take(5, 6, 7, 8, 9)
    asked = [call for call in learner.calls if call.startswith("evaluate")]
    assert asked == ["evaluate 8", "evaluate 9"]


async def test_preferences_are_learned_as_they_are_stored(tmp_path: Path) -> None:
    """Of a pair, sft learns the chosen answer."""
    prompt = row("1+1?", None).prompt
    pair = DatasetRow(prompt=prompt, chosen="2", rejected="3")
    run = await sft(tmp_path, pair, row("2+2?", "4"))
    found = await read_learned_rows(run.bench.ports, run.spec, run.spec.dataset, (0,))
    assert found == (Conversation(0, (*prompt, ChatMessage(role="assistant", content="2"))),)
    spec = train_spec(dataset=run.spec.dataset, advanced={"algorithm": "dpo"})
    batch = await build_step_batch(run.bench.ports, spec, number=1, groups=(), rows=(1, 0))
    assert batch.conversations == ()
    assert batch.preferences == (
        Preference(1, row("2+2?", None).prompt),
        Preference(0, prompt, "2", "3"),
    )


async def test_recorded_groups_are_learned_in_the_order_of_the_dataset(tmp_path: Path) -> None:
    """That is the order in which they were sampled, so that their own step can be taken again."""
    run = Run(tmp_path)
    rows = [
        DatasetRow(
            prompt=(),
            trajectory=Trajectory(
                group=f"r0-train-1-{slot}-0",
                version=0,
                samples=(SampleRecord(index=0, text=str(slot)), SampleRecord(index=1)),
                rewards=(float(slot), None),
            ),
        )
        for slot in range(3)
    ]
    dataset = await run.bench.dataset(*rows, row("1+1?", "2"))
    spec = train_spec(dataset=dataset, advanced={"execution_mode": "offline"})
    batch = await build_step_batch(run.bench.ports, spec, number=1, groups=(), rows=(2, 0))
    assert [(group.slot, group.rewards) for group in batch.groups] == [
        (0, (0.0, None)),
        (1, (2.0, None)),
    ]
    assert batch.groups[1].samples[0].text == "2"
    assert not batch.conversations


async def test_a_row_without_a_recorded_group_is_refused_by_name(tmp_path: Path) -> None:
    run = Run(tmp_path)
    dataset = await run.bench.dataset(row("1+1?", "2"))
    spec = train_spec(dataset=dataset, advanced={"execution_mode": "offline"})
    with pytest.raises(Refused, match="row 0 of sums has no recorded group"):
        await build_step_batch(run.bench.ports, spec, number=1, groups=(), rows=(0,))


async def test_sft_on_a_row_without_label_is_refused_by_name(tmp_path: Path) -> None:
    run = await sft(tmp_path, row("1+1?", "2"), row("2+2?", None))
    with pytest.raises(Refused, match="row 1 of sums has no label"):
        await run.take(1)
