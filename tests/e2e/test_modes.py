"""Execution modes: sampling runs ahead of learning, and the bits do not depend on who is quick."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from schemas.events import BatchAssembled, GroupGraded, GroupsRequested, PolicyUpdated, StepSettled
from schemas.toml.parser import parse_run
from tests.kit.in_memory import in_memory
from tests.kit.platform import ROWS, make_workspace, run_config
from trainer.schedule import pace_of

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch]

STEPS = 5
MODES: Mapping[str, Mapping[str, object]] = {
    "sync": {"execution_mode": "sync"},
    "one_step_off_async": {"execution_mode": "one_step_off_async"},
    "fully_async": {
        "execution_mode": "fully_async",
        "max_steps_off_policy": 2,
        "weight_sync_interval": 2,
    },
}


@dataclass(frozen=True)
class Ended:
    """The result of a run. `graded`: its groups in the order in which they were graded; `ahead`: of how
    many steps the groups were asked for before the step before was taken; `drifts`: by step, how far the
    policy that was trained was from the logprobs of its samples."""

    adapter: str
    lags: list[float]
    drifts: list[float]
    pinned: dict[int, int]
    graded: list[tuple[int, int]]
    ahead: int


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("modes") / "workspace")


def config(mode: str) -> dict[str, dict[str, Any]]:
    return run_config(advanced={"max_steps": STEPS, **MODES[mode]})


def ended(workspace: Path, home: Path, mode: str, *, latency_seed: int | None) -> Ended:
    """A run in this mode, with workers as slow as `latency_seed` draws."""
    home.mkdir()
    rows = home / "rows.jsonl"
    rows.write_text(ROWS)

    async def trained() -> Ended:
        async with (
            in_memory(home / "home", latency_seed=latency_seed) as started,
            asyncio.timeout(360),
        ):
            await started.workspaces.add(str(workspace), "w")
            await started.upload("numbers", rows)
            await started.run_to_end(config(mode), workspace="w")
            told = [recorded.event for recorded in started.world.events]
            assert len(started.events_of(BatchAssembled)) == STEPS
            assert all(len(batch.groups) == 2 for batch in started.events_of(BatchAssembled))
            lags = [event.metrics["train/lag"] for event in started.events_of(StepSettled)[1:]]
            graded = started.events_of(GroupGraded)
            learned = {e.step: n for n, e in enumerate(told) if isinstance(e, PolicyUpdated)}
            return Ended(
                adapter=started.final_adapter(),
                lags=lags,
                drifts=[
                    e.metrics["train/sampler_mismatch"] for e in started.events_of(StepSettled)[1:]
                ],
                pinned={
                    r.step: r.template.policy.version for r in started.events_of(GroupsRequested)
                },
                graded=[(e.spec.group_key.step, e.spec.group_key.slot) for e in graded],
                ahead=sum(
                    n < learned.get(e.step - 1, 0)
                    for n, e in enumerate(told)
                    if isinstance(e, GroupsRequested)
                ),
            )

    return asyncio.run(trained())


@pytest.fixture(scope="module")
def calm(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """A run of each mode whose workers are as quick as they can."""
    homes = tmp_path_factory.mktemp("calm")
    return {mode: ended(workspace, homes / mode, mode, latency_seed=None) for mode in MODES}


@pytest.mark.parametrize("mode", ["one_step_off_async", "fully_async"])
def test_the_bits_do_not_depend_on_who_is_quick(
    workspace: Path, calm: Mapping[str, Ended], tmp_path: Path, mode: str
) -> None:
    shuffled = ended(workspace, tmp_path / "home", mode, latency_seed=1)
    assert shuffled.adapter == calm[mode].adapter
    assert shuffled.graded != calm[mode].graded, "the order was shuffled"


@pytest.mark.parametrize("mode", MODES)
def test_each_step_trains_the_version_it_should_within_the_bound(
    calm: Mapping[str, Ended], mode: str
) -> None:
    bound, run = pace_of(parse_run(config(mode))), calm[mode]
    steps = range(1, STEPS + 1)
    assert run.pinned == {step: bound.pinned_version(step) for step in steps}
    assert run.lags == [step - 1 - bound.pinned_version(step) for step in steps]
    assert max(run.lags) <= bound.most_lag
    assert run.ahead == (0 if mode == "sync" else STEPS - 1)


@pytest.mark.parametrize("mode", MODES)
def test_samples_carry_the_logprobs_of_the_version_that_sampled_them(
    calm: Mapping[str, Ended], mode: str
) -> None:
    """Not of the one that is trained: the ratio must see how far the policy has moved since."""
    for lag, drift in zip(calm[mode].lags, calm[mode].drifts, strict=True):
        assert (drift > 1e-4) == (lag > 0), (lag, drift)


def test_other_modes_are_other_runs(calm: Mapping[str, Ended]) -> None:
    """The version that a group samples with matters; otherwise the test above could not fail."""
    assert len({run.adapter for run in calm.values()}) == len(MODES)
