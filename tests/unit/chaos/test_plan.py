"""The plan of `make chaos`: a pure function of seed and index, for each mode."""

import pytest

from tests.chaos.plan import BLOCK, CHILDREN, CONFIGS, FROZEN, JOIN, MODES, Kill, Mode, Pause, trial

MANY = range(120)


@pytest.mark.parametrize("mode", MODES)
def test_a_trial_depends_on_seed_and_index_only(mode: Mode) -> None:
    found = [trial(3, index, stack="embedded", mode=mode) for index in MANY]
    again = [trial(3, index, stack="embedded", mode=mode) for index in reversed(MANY)]
    assert found == again[::-1]
    assert found != [trial(4, index, stack="embedded", mode=mode) for index in MANY]


@pytest.mark.parametrize("mode", MODES)
def test_every_shape_and_so_every_execution_mode_is_drawn(mode: Mode) -> None:
    shapes = {trial(0, index, stack="embedded", mode=mode).shape for index in MANY}
    assert shapes == set(CONFIGS)
    modes = {config["advanced"].get("execution_mode", "sync") for config in CONFIGS.values()}
    assert modes == {"sync", "one_step_off_async", "fully_async"}


def test_only_a_pause_freezes_several_processes_each_for_1_to_10_s() -> None:
    faults = [f for i in MANY for f in trial(0, i, stack="real", mode="freeze").faults]
    pauses = [fault for fault in faults if isinstance(fault, Pause)]
    assert len(pauses) == len(faults)
    stops = [stop for pause in pauses for stop in pause.stops]
    assert all(1 <= for_s <= 10 for _, for_s in stops)
    assert {target for target, _ in stops} == {*FROZEN, "broker"}
    together = {target for p in pauses if len(p.stops) > 1 for target, _ in p.stops}
    assert together >= {"worker", "database"}


@pytest.mark.parametrize(
    ("mode", "stack", "wanted"),
    [
        ("children", "embedded", {*CHILDREN}),
        ("children", "real", {*CHILDREN, "broker"}),
        ("twice", "real", {"worker", "control", "user", "supervisor", JOIN}),
    ],
)
def test_every_target_of_a_mode_is_hit(mode: Mode, stack: str, wanted: set[str]) -> None:
    faults = [f for i in MANY for f in trial(0, i, stack=stack, mode=mode).faults]
    assert {f.target for f in faults if isinstance(f, Kill)} == wanted


def test_every_layout_comes_up_in_blocks() -> None:
    layouts = [trial(0, index, stack="embedded", mode="twice").layout for index in MANY]
    assert set(layouts) == {"one", "two", "each"}
    blocks = [layouts[start : start + BLOCK] for start in range(0, len(layouts), BLOCK)]
    assert all(len(set(block)) == 1 for block in blocks)
