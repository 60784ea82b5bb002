"""The cascade and hop-by-hop delivery, in any order and with duplicates, end in the same streams."""

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.events import RepositoryPushed, RunRequested
from schemas.ids import run_stream
from schemas.specs import CommitSpec, Entrypoint
from tests.kit.simulate import Simulation
from tests.kit.specs import DATASET, MODEL, config

EVENTS = (
    RunRequested(
        run="r1",
        run_name="first",
        config=config(
            training={"n_samples_per_prompt": 2, "rollout_batch_size": 2},
            checkpoints={"checkpoint_save_freq": 2, "eval_interval": 2},
            advanced={"max_steps": 3, "seed": 3},
        ),
        model=MODEL,
        dataset=DATASET,
        validation=DATASET,
        workspace="w1",
    ),
    RepositoryPushed(
        workspace="w1",
        workspace_name="w",
        commit=CommitSpec(url="/nowhere"),
        entrypoints=(Entrypoint(rollout="say"),),
        requester=run_stream("r1"),
    ),
)


async def cascaded() -> Simulation:
    simulation = await Simulation.begin(EVENTS, apart=False)
    await simulation.run(lambda todo: 0)
    return simulation


REFERENCE = asyncio.run(cascaded()).told()


def test_the_reference_is_a_whole_run() -> None:
    assert sum("rl.run.finished" in line for line in REFERENCE) == 1
    assert sum("rl.policy.updated" in line for line in REFERENCE) == 3
    assert sum("rl.evaluation.completed" in line for line in REFERENCE) == 3


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.booleans())
def test_any_order_of_delivery_ends_in_the_same_streams(seed: int, apart: bool) -> None:
    draw = random.Random(seed)  # noqa: S311

    async def tell() -> Simulation:
        simulation = await Simulation.begin(EVENTS, apart=apart)
        await simulation.run(draw.randrange)
        return simulation

    assert asyncio.run(tell()).told() == REFERENCE


COPIES = 10


@settings(max_examples=5)
@given(st.integers(0, 2**32), st.booleans())
def test_ten_copies_of_each_record_in_any_order_end_in_the_same_streams(
    seed: int, apart: bool
) -> None:
    draw = random.Random(seed)  # noqa: S311

    async def tell() -> Simulation:
        simulation = await Simulation.begin(EVENTS, apart=apart)
        await simulation.run(draw.randrange, copies=COPIES)
        return simulation

    simulation = asyncio.run(tell())
    assert min(simulation.delivered.values()) >= COPIES
    assert simulation.told() == REFERENCE


@settings(max_examples=5)
@given(st.integers(0, 2**32))
def test_delivering_everything_again_changes_nothing(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311

    async def tell() -> tuple[list[str], list[str]]:
        simulation = await Simulation.begin(EVENTS, apart=True)
        await simulation.run(draw.randrange)
        before = simulation.told()
        await simulation.deliver_all_again()
        simulation.world.inbox.clear()
        await simulation.deliver_all_again()
        return before, simulation.told()

    before, after = asyncio.run(tell())
    assert before == REFERENCE
    assert after == before, "even without the inbox, the deciders know what they decided"
