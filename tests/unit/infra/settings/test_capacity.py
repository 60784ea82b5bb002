"""HEADRACE_CAPACITY, and the places of a lane without it."""

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


def test_an_engine_has_spare_places_unless_the_operator_sets_its_places() -> None:
    assert spare_of({"user": 2}, generate=64) == {Lane.GENERATE: 10}
    assert spare_of({"generate": 64}, generate=64) == {}
    assert spare_of({}, generate=None) == {}
