"""The cascade and hop-by-hop delivery end in the same streams, in any order and with duplicates."""

import asyncio
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.events import CommitRequested, RunRequested
from schemas.ids import run_stream
from schemas.specs import CommitSpec, Entrypoint
from tests.kit.property_examples import examples
from tests.kit.simulate import Simulation
from tests.kit.specs import DATASET, MODEL, config

PUSHED = CommitRequested(
    workspace="w1",
    workspace_name="w",
    commit=CommitSpec(url="/nowhere"),
    entrypoints=(Entrypoint(rollout="say"),),
    requester=run_stream("r1"),
)

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "one_step_off_async": {"execution_mode": "one_step_off_async"},
    "fully_async": {"execution_mode": "fully_async", "max_steps_off_policy": 3},
    "every other version": {
        "execution_mode": "fully_async",
        "max_steps_off_policy": 2,
        "weight_sync_interval": 2,
    },
}
MODE = st.sampled_from(sorted(MODES))


def events(mode: str) -> tuple[RunRequested, CommitRequested]:
    """The events that request a run in this mode, as a producer appends them."""
    requested = RunRequested(
        run="r1",
        run_name="first",
        config=config(
            training={"n_samples_per_prompt": 2, "rollout_batch_size": 2},
            checkpoints={"checkpoint_save_freq": 2, "eval_interval": 2},
            advanced={"max_steps": 5, "seed": 3, **MODES[mode]},
        ),
        model=MODEL,
        dataset=DATASET,
        validation=DATASET,
        workspace="w1",
    )
    return requested, PUSHED


@cache
def reference(mode: str) -> list[str]:
    """The final streams of a run when one process does everything in order."""

    async def cascaded() -> list[str]:
        simulation = await Simulation.begin(events(mode), apart=False)
        await simulation.run(lambda todo: 0)
        return simulation.stream_texts()

    return asyncio.run(cascaded())


@pytest.mark.parametrize("mode", MODES)
def test_the_reference_is_a_whole_run(mode: str) -> None:
    told = reference(mode)
    assert sum("rl.run.finished" in line for line in told) == 1
    assert sum("rl.policy.updated" in line for line in told) == 5
    assert sum("rl.evaluation.completed" in line for line in told) == 4


@examples(20)
@given(MODE, st.integers(0, 2**32), st.booleans())
def test_any_order_of_delivery_ends_in_the_same_streams(mode: str, seed: int, apart: bool) -> None:
    draw = random.Random(seed)

    async def tell() -> Simulation:
        simulation = await Simulation.begin(events(mode), apart=apart)
        await simulation.run(draw.randrange)
        return simulation

    assert asyncio.run(tell()).stream_texts() == reference(mode)


COPIES = 10


@examples(5)
@given(MODE, st.integers(0, 2**32), st.booleans())
def test_ten_copies_of_each_record_in_any_order_end_in_the_same_streams(
    mode: str, seed: int, apart: bool
) -> None:
    draw = random.Random(seed)

    async def tell() -> Simulation:
        simulation = await Simulation.begin(events(mode), apart=apart)
        await simulation.run(draw.randrange, copies=COPIES)
        return simulation

    simulation = asyncio.run(tell())
    assert min(simulation.delivered.values()) >= COPIES
    assert simulation.stream_texts() == reference(mode)


@examples(5)
@given(MODE, st.integers(0, 2**32))
def test_delivering_everything_again_changes_nothing(mode: str, seed: int) -> None:
    draw = random.Random(seed)

    async def tell() -> tuple[list[str], list[str]]:
        simulation = await Simulation.begin(events(mode), apart=True)
        await simulation.run(draw.randrange)
        before = simulation.stream_texts()
        await simulation.deliver_all_again()
        simulation.world.inbox.clear()
        await simulation.deliver_all_again()
        return before, simulation.stream_texts()

    before, after = asyncio.run(tell())
    assert before == reference(mode)
    assert after == before, "even without the inbox, the deciders know what they decided"
