"""HEADRACE_CAPACITY, and the places of a lane without it."""

import os

import pytest

from infra.settings.capacity import LANES, parse_capacity
from infra.settings.settings import BadSetting, Settings
from infra.spine.runtime.hosting import FEWEST_USER, capacity_of, spare_of
from schemas.effects import Lane


def test_the_setting_names_every_lane() -> None:
    assert set(LANES) == {str(lane) for lane in Lane}


def test_a_capacity_is_read_for_the_lanes_that_it_names() -> None:
    assert parse_capacity("") == {}
    assert parse_capacity("generate=256, user=8") == {"generate": 256, "user": 8}


@pytest.mark.parametrize(
    "value",
    ["generate", "generate=", "generate=0", "gpu=1", "user=1,user=2", "user=99999", "user=²"],
)
@pytest.mark.parametrize("name", ["HEADRACE_CAPACITY", "HEADRACE_RUN_CAPACITY"])
def test_a_bad_capacity_is_refused_with_its_form(name: str, value: str) -> None:
    with pytest.raises(BadSetting, match=rf"{name} holds .* it may hold lane=number"):
        Settings.load({"HEADRACE_HOME": "/nowhere", name: value})


def test_a_process_holds_what_it_computes_at_once() -> None:
    places = capacity_of({}, generate=64)
    assert (places[Lane.TRAIN], places[Lane.EXPORT], places[Lane.GENERATE]) == (1, 1, 64)
    assert places[Lane.USER] >= FEWEST_USER
    assert Lane.CONTROL not in places
    chosen = capacity_of({"generate": 7, "control": 2}, generate=64)
    assert (chosen[Lane.GENERATE], chosen[Lane.CONTROL]) == (7, 2)
    assert Lane.GENERATE not in capacity_of({}, generate=None)


@pytest.mark.parametrize(
    ("cores", "memory_mib", "places"),
    [
        (8, 64 << 10, 32),
        (64, 8 << 10, 32),
        (8, 8000, 31),
        (2, 16 << 10, 8),
        (1, 16 << 10, 4),
        (8, 512, 4),
    ],
)
def test_graders_get_four_places_a_core_or_one_for_each_256_mib(
    monkeypatch: pytest.MonkeyPatch, cores: int, memory_mib: int, places: int
) -> None:
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": memory_mib << 8}
    with monkeypatch.context() as machine:
        machine.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
        machine.setattr(os, "sysconf", sizes.__getitem__)
        found = capacity_of({}, generate=None)
        chosen = capacity_of({"user": 7}, generate=None)
    assert (found[Lane.USER], chosen[Lane.USER]) == (places, 7)


def test_an_engine_has_spare_places_unless_the_operator_sets_its_places() -> None:
    assert spare_of({"user": 2}, generate=64) == {Lane.GENERATE: 10}
    assert spare_of({"generate": 64}, generate=64) == {}
    assert spare_of({}, generate=None) == {}
