"""Prices: what an hour of a device, a month of storage and a token cost, in US dollars.

A price that is not set makes no money: hours and tokens count all the same.
"""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from schemas.costs.work import CPU, GPU

HOUR_S = 3600.0
MONTH_S = 730 * HOUR_S
GB = 1e9
GPU_HOUR = "gpu_hour."


class Prices(BaseModel):
    """`cpu_hour` is the price of an hour of a worker's CPU, and `gpu_hour` that of an hour of a GPU by
    its name. `gb_month` is that of 10^9 stored bytes for a month of 730 hours. `call_tokens` is that of
    a million tokens of judges and model providers whose own price is not known."""

    model_config = ConfigDict(frozen=True)
    cpu_hour: float | None = Field(default=None, exclude_if=lambda value: value is None)
    gpu_hour: dict[str, float] = Field(default={}, exclude_if=lambda value: value == {})
    gb_month: float | None = Field(default=None, exclude_if=lambda value: value is None)
    call_tokens: float | None = Field(default=None, exclude_if=lambda value: value is None)

    @classmethod
    def of(cls, amounts: Mapping[str, float]) -> "Prices":
        """Return prices by their names in the settings, where those of GPUs begin with `gpu_hour.`."""
        gpus = {k.removeprefix(GPU_HOUR): v for k, v in amounts.items() if k.startswith(GPU_HOUR)}
        plain = {name: amount for name, amount in amounts.items() if not name.startswith(GPU_HOUR)}
        return cls.model_validate({**plain, "gpu_hour": gpus})

    @property
    def has_devices(self) -> bool:
        """Whether the hours of any device have a price."""
        return self.cpu_hour is not None or bool(self.gpu_hour)

    def hour_of(self, device: str) -> float | None:
        """Return the price of an hour of a kind of device, or None if it has none."""
        return self.cpu_hour if device == CPU else self.gpu_hour.get(device.removeprefix(GPU))

    def devices_usd(self, spent: Mapping[str, float]) -> float | None:
        """Return the price of these device-seconds; None if none of their devices has a price."""
        priced = [
            seconds * hour / HOUR_S
            for device, seconds in spent.items()
            if (hour := self.hour_of(device)) is not None
        ]
        return sum(priced) if priced else None

    def calls_usd(self, tokens: int) -> float:
        """Return the price of tokens of judges and providers that named none."""
        return tokens * (self.call_tokens or 0.0) / 1e6
