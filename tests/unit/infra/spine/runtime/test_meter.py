"""What a device worked for each effect: exact with a clock that the tests move."""

import random
from dataclasses import replace
from uuid import uuid4

import pytest

from infra.spine.ports.effects import Claimed
from infra.spine.runtime.meter import Meter
from schemas.costs.work import CPU, gpu_kind
from schemas.effects import Lane, TrainStep
from schemas.ids import EffectId
from tests.contracts.effects_suite import effect


class MovedClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def claimed(epoch: int = 1) -> Claimed:
    return replace(Claimed.from_new(effect(uuid4().hex)), epoch=epoch)


def test_two_effects_at_once_share_each_second() -> None:
    clock, first, second = MovedClock(), claimed(), claimed()
    meter = Meter({}, now=clock)
    meter.begin(first)
    clock.now += 10
    meter.begin(second)
    clock.now += 4
    assert meter.end(first) == 12
    clock.now += 3
    assert meter.end(second) == 5


def test_the_sum_over_effects_is_the_time_in_which_the_device_was_busy() -> None:
    clock, draw = MovedClock(), random.Random(7)
    meter, running, total, busy = Meter({}, now=clock), list[Claimed](), 0.0, 0.0
    for _ in range(2000):
        if running and draw.random() < 0.5:
            total += meter.end(running.pop(draw.randrange(len(running))))
        else:
            running.append(claimed())
            meter.begin(running[-1])
        passed = draw.random()
        clock.now += passed
        busy += passed if running else 0.0
    total += sum(map(meter.end, running))
    assert total == pytest.approx(busy, abs=2000 * 1e-6)


def test_an_effect_that_waits_elsewhere_leaves_the_device_to_the_others() -> None:
    clock, waiting, working = MovedClock(), claimed(), claimed()
    meter = Meter({}, now=clock)
    meter.begin(waiting)
    meter.begin(working)
    meter.pause(waiting)
    clock.now += 6
    meter.resume(waiting)
    clock.now += 2
    assert (meter.end(waiting), meter.end(working)) == (1, 7)


def test_a_device_is_shared_only_within_its_kind() -> None:
    clock, cpu = MovedClock(), claimed()
    meter = Meter({Lane.TRAIN: "gpu.H100"}, now=clock)
    step = replace(cpu, id=EffectId(uuid4()), effect=TrainStep.model_construct())
    assert [meter.device_of(one.effect.lane) for one in (cpu, step)] == [CPU, "gpu.H100"]
    meter.begin(cpu)
    meter.begin(step)
    clock.now += 5
    assert (meter.end(cpu), meter.end(step)) == (5, 5)


def test_an_effect_ends_once_and_a_clock_that_goes_back_takes_nothing() -> None:
    clock, one = MovedClock(), claimed()
    meter = Meter({}, now=clock)
    meter.begin(one)
    clock.now -= 50
    assert meter.end(one) == 0
    assert meter.end(one) == 0
    meter.pause(one)
    meter.resume(one)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu.H100"),
        ("NVIDIA A100-SXM4-40GB", "gpu.A100"),
        ("Tesla T4", "gpu.T4"),
        ("NVIDIA GeForce RTX 4090", "gpu.RTX-4090"),
        ("", "gpu.unknown"),
    ],
)
def test_a_gpu_is_named_by_its_model(name: str, kind: str) -> None:
    assert gpu_kind(name) == kind
