"""Measures the seconds of a device that each effect takes.

Effects of a process run at the same time on one device. While n of them run, each takes 1/n of every
second. So the sum over all effects is the time in which the device was busy, whatever ran beside what.
A device that runs nothing is idle, and nobody pays for it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infra.spine.ports.effects import Claimed
from schemas.costs.work import CPU
from schemas.effects.effect import Lane
from schemas.ids import EffectId

DeviceOf = Mapping[Lane, str]
"""The kind of device of each lane. A lane that is not there runs on the CPU."""


@dataclass(slots=True)
class _Device:
    """`share_s` is how many seconds an effect would have, had it run all the time."""

    running: int = 0
    share_s: float = 0.0
    at: float = 0.0

    def advance(self, now: float) -> None:
        """Move to `now`. A clock that goes back moves nothing."""
        passed = now - self.at
        if passed > 0:
            self.share_s += passed / self.running if self.running else 0.0
            self.at = now


@dataclass(slots=True)
class _Reading:
    """An effect that is measured: its device, what it has taken until it last stood still, and the share
    of its device since when it runs (None: it stands still)."""

    device: str
    taken_s: float = 0.0
    since: float | None = None


class Meter:
    """The measurements of one process, by claim. `now` is a clock that never goes back."""

    def __init__(self, devices: DeviceOf, *, now: Callable[[], float] = time.monotonic) -> None:
        self._kinds = devices
        self._now = now
        self._devices: dict[str, _Device] = {}
        self._readings: dict[tuple[EffectId, int], _Reading] = {}

    def device_of(self, lane: Lane) -> str:
        """Return the kind of device on which this process performs effects of a lane."""
        return self._kinds.get(lane, CPU)

    def begin(self, claimed: Claimed) -> None:
        """Measure an effect from now on."""
        reading = _Reading(self.device_of(claimed.effect.lane))
        self._readings[claimed.id, claimed.epoch] = reading
        self._start(reading)

    def pause(self, claimed: Claimed) -> None:
        """The effect waits for something elsewhere and takes nothing until `resume`."""
        reading = self._readings.get((claimed.id, claimed.epoch))
        if reading is not None:
            self._stop(reading)

    def resume(self, claimed: Claimed) -> None:
        """The effect runs again, unless it has ended."""
        reading = self._readings.get((claimed.id, claimed.epoch))
        if reading is not None and reading.since is None:
            self._start(reading)

    def end(self, claimed: Claimed) -> float:
        """Return the device-seconds that the effect took, and forget it. 0 if it is not measured."""
        reading = self._readings.pop((claimed.id, claimed.epoch), None)
        if reading is None:
            return 0.0
        self._stop(reading)
        return round(reading.taken_s, 6)

    def _start(self, reading: _Reading) -> None:
        device = self._advance(reading.device)
        device.running += 1
        reading.since = device.share_s

    def _stop(self, reading: _Reading) -> None:
        if reading.since is None:
            return
        device = self._advance(reading.device)
        device.running -= 1
        reading.taken_s += device.share_s - reading.since
        reading.since = None

    def _advance(self, kind: str) -> _Device:
        now = self._now()
        device = self._devices.setdefault(kind, _Device(at=now))
        device.advance(now)
        return device
