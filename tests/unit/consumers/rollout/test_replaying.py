"""A fork takes the samples that its parent trained, and none that the parent's learner refuted."""

from uuid import uuid4

from consumers.rollout.replaying import find_recorded
from infra.spine.memory.event_log import MemoryLog, World
from schemas.effects import GroupReplayed, ReplayGroup
from schemas.events import GroupGenerated, SampleGenerated
from schemas.ids import GroupKey, Purpose
from schemas.specs import GroupSpec
from tests.kit.specs import entry, ref, template


def group(owner: str, *, replacement: int = 0, avoid: tuple[str, ...] = ()) -> GroupSpec:
    of = template().model_copy(update={"avoid": avoid})
    if owner != "parent":
        of = of.model_copy(update={"replay_of": "parent"})
    return GroupSpec(
        group=str(GroupKey(owner, Purpose.TRAIN, 1, 0, replacement)), row=3, template=of
    )


def generated(replacement: int, *, avoid: tuple[str, ...] = ()) -> GroupGenerated:
    return GroupGenerated(
        spec=group("parent", replacement=replacement, avoid=avoid),
        entries=(entry(0), entry(1)),
        parts=(ref(f"samples {replacement}"),),
    )


async def found(*events: GroupGenerated | SampleGenerated) -> GroupReplayed:
    """What a fork finds of the group, in a log with these events of its parent."""
    log = MemoryLog(World())
    for event in events:
        await log.append([event], cause=uuid4())
    return await find_recorded(ReplayGroup(spec=group("child")), log)


async def test_recorded_samples_of_the_parent_are_found() -> None:
    assert (await found(generated(0))).parts == (ref("samples 0"),)


async def test_refuted_samples_are_not_taken_but_those_that_were_made_in_their_place() -> None:
    refuted, again = generated(0), generated(1000, avoid=("http://wrong",))
    assert (await found(refuted, again)).parts == (ref("samples 1000"),)
    last = generated(2000, avoid=("http://also-wrong", "http://wrong"))
    assert (await found(refuted, again, last)).parts == (ref("samples 2000"),)


async def test_refuted_samples_are_not_taken_while_others_are_made_in_their_place() -> None:
    begun = SampleGenerated(spec=group("parent", replacement=1000), entry=entry(0), artifact=None)
    answer = await found(generated(0), begun)
    assert answer.problem == "run parent has not generated this group"
