"""Prices and budgets: how they are read, and what they make of hours and tokens."""

import math

import pytest
from pydantic import ValidationError

from infra.settings.prices import parse_prices
from infra.settings.settings import BadSetting, Settings
from schemas.costs.budget import Budget, Spending
from schemas.costs.prices import Prices


def test_prices_are_read_by_name() -> None:
    found = parse_prices('cpu_hour=0.04, gpu_hour."H100"=2.5,gpu_hour.T4=0.3,gb_month=0.02')
    assert Prices.of(found) == Prices(
        cpu_hour=0.04, gpu_hour={"H100": 2.5, "T4": 0.3}, gb_month=0.02
    )
    assert Prices.of(parse_prices("")) == Prices()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("gpu=1", "gpu is not a price"),
        ("tpu_hour=1", "tpu_hour is not a price"),
        ("gpu_hour.=1", "is not a price"),
        ("cpu_hour=-1", "a price is a number of US dollars"),
        ("cpu_hour=nan", "a price is a number of US dollars"),
        ("cpu_hour=", "a price is a number of US dollars"),
        ("cpu_hour=1,cpu_hour=2", "given twice"),
    ],
)
def test_a_bad_price_is_refused_with_what_is_wrong(value: str, said: str) -> None:
    with pytest.raises(BadSetting, match="HEADRACE_PRICES holds") as refused:
        Settings.load({"HEADRACE_HOME": "/nowhere", "HEADRACE_PRICES": value})
    assert said in str(refused.value)


def test_a_device_without_a_price_makes_no_money_and_counts_hours() -> None:
    prices = Prices(gpu_hour={"H100": 2.0})
    assert prices.devices_usd({"cpu": 3600.0}) is None
    assert prices.devices_usd({"cpu": 3600.0, "gpu.H100": 1800.0}) == 1.0
    amounts = Spending({"cpu": 3600.0, "gpu.H100": 1800.0}, 5, 0.25).amounts(prices)
    assert amounts == {"max_cost": 1.25, "max_tokens": 5.0, "max_hours": 1.5}


@pytest.mark.parametrize("limit", [-1.0, 0.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["max_cost", "max_hours"])
def test_a_budget_that_is_not_a_positive_number_is_refused(name: str, limit: float) -> None:
    with pytest.raises(ValidationError):
        Budget.model_validate({name: limit})


def test_a_raised_budget_keeps_the_limits_that_are_not_raised() -> None:
    before = Budget(max_cost=1.0, max_tokens=10)
    assert before.with_limits(Budget(max_cost=2.0)).limits == {"max_cost": 2.0, "max_tokens": 10.0}
