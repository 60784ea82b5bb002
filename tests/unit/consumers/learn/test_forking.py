"""A fork takes over the version that its parent's log names, whatever else the parent's policy stream
holds."""

from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from consumers.learn.forking import fork_policy
from consumers.learn.replay import HistoryPorts
from infra.spine.memory.event_log import MemoryLog, World
from infra.spine.ports.event_log import Recorded
from schemas.effects import InitializePolicy
from schemas.errors import TransientError
from schemas.events import Event, PolicyInitialized, PolicyUpdated, RunWarned, SampleRefuted
from schemas.ids import policy_stream
from schemas.models.fork import ForkPoint
from tests.kit.specs import train_spec, version

PARENT = "r1"


def updated(step: int) -> PolicyUpdated:
    return PolicyUpdated(
        run=PARENT,
        step=step,
        state=version(step),
        batch=UUID(int=step),
        metrics={},
        plan=(),
        versions={},
        pinned=True,
    )


def refuted(step: int, index: int) -> SampleRefuted:
    return SampleRefuted(
        run=PARENT,
        step=step,
        batch=UUID(int=step),
        sample=f"{PARENT}-train-{step}-0-0.{index}",
        server="http://s",
        servers=("http://s",),
        policy_version=step - 1,
        test="distance",
        tokens=9,
        log_e=24.0,
        distance=0.02,
        slots=(0,),
        attempt=1,
    )


def warned(step: int) -> RunWarned:
    return RunWarned(run=PARENT, step=step, message="m", about="refuted", category="http://s")


@pytest.mark.parametrize(
    "between",
    [
        (),
        (refuted(2, 0), warned(2)),
        (*(refuted(2, index) for index in range(80)), warned(2)),
    ],
    ids=["nothing", "one", "more than a page"],
)
async def test_a_fork_counts_versions_and_not_the_refuted_samples_of_its_parent(
    between: tuple[Event, ...],
) -> None:
    spec, log = train_spec(), MemoryLog(World())
    first = PolicyInitialized(run=PARENT, spec=spec, state=version(0), versions={})
    for event in (first, updated(1), *between, updated(2), updated(3)):
        await log.append([event], cause=uuid4())
    found = await log.load({policy_stream(PARENT): 0})
    place = next(
        one.version
        for one in found[policy_stream(PARENT)]
        if isinstance(one.event, PolicyUpdated) and one.event.step == 2
    )
    point = ForkPoint(parent=PARENT, step=2, position=9, policy_position=place)
    child = spec.model_copy(update={"run": "child"})
    unused = cast("Any", None)
    built = await fork_policy(
        InitializePolicy(spec=child, fork=point), point, unused, HistoryPorts(log, unused, unused)
    )
    assert built.state == version(2)
    assert built.forked is not None
    assert built.forked.taken == 2


class HidingLog(MemoryLog):
    """A log whose newest events are hidden behind a transaction that has not ended."""

    async def read(self, *_: object, **__: object) -> list[Recorded]:
        return []


async def test_a_fork_waits_while_the_log_hides_the_version_that_it_begins_with() -> None:
    """Otherwise it would count refuted samples that are hidden too."""
    spec, log = train_spec(), HidingLog(World())
    first = PolicyInitialized(run=PARENT, spec=spec, state=version(0), versions={})
    for event in (first, refuted(1, 0), updated(1)):
        await log.append([event], cause=uuid4())
    point = ForkPoint(parent=PARENT, step=1, position=9, policy_position=3)
    unused = cast("Any", None)
    effect = InitializePolicy(spec=spec.model_copy(update={"run": "child"}), fork=point)
    with pytest.raises(TransientError, match="does not show version"):
        await fork_policy(effect, point, unused, HistoryPorts(log, unused, unused))
