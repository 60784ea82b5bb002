"""Sampler and learner are stopped and continued at random, and the database is stopped in between:
leases run out, answers come late, cancellations meet time-outs. Every run ends, with the bits of a
calm one.

Runs of all execution modes side by side meet the same pauses. HEADRACE_FREEZES says how many pauses
(6 by default; `make storms` asks for 200), HEADRACE_FREEZE_SEED which.
"""

import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.operations.local.home import read_state
from tests.chaos.victims import Processes
from tests.kit.ledger import check
from tests.kit.platform import Platform, final_adapter, make_workspace, platform, run_config

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

PAUSES = int(os.environ.get("HEADRACE_FREEZES", "6"))
SEED = int(os.environ.get("HEADRACE_FREEZE_SEED", "11"))
LONGEST_S = 7.0
STEPS = 8 + PAUSES
MODES: Mapping[str, Mapping[str, object]] = {
    "sync": {},
    "one_step_off_async": {},
    "fully_async": {"max_steps_off_policy": 3},
}


@dataclass(frozen=True, slots=True)
class Pause:
    """A target is stopped `at_s` seconds into a round, for `for_s`."""

    target: str
    at_s: float
    for_s: float


def rounds(draw: random.Random) -> Iterator[Sequence[Pause]]:
    """Both processes, and the database while they stand still or just go on."""
    for _ in range(max(1, PAUSES // 3)):
        yield (
            Pause("sampler", draw.uniform(0.0, 1.0), draw.uniform(1.0, LONGEST_S)),
            Pause("learner", draw.uniform(0.0, 1.0), draw.uniform(1.0, LONGEST_S)),
            Pause("database", draw.uniform(0.0, LONGEST_S), draw.uniform(1.0, 4.0)),
        )


@contextmanager
def stopped() -> Iterator[dict[str, list[int]]]:
    """The stopped processes. At the end there are none."""
    still: dict[str, list[int]] = {}
    try:
        yield still
    finally:
        for target in list(still):
            send(signal.SIGCONT, still.pop(target))


def send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def pids(running: Platform, target: str, draw: random.Random) -> list[int]:
    if target == "database":
        return Processes((running,)).stopped_together("database", draw)
    state = read_state(running.home)
    children = state.children if state else ()
    return [child.pid for child in children if child.name == target and child.pid is not None]


def carry_out(running: Platform, pauses: Sequence[Pause], draw: random.Random) -> None:
    """One round: returns when everybody goes on again."""
    moments = [(p.at_s, p.target, True) for p in pauses]
    moments += [(p.at_s + p.for_s, p.target, False) for p in pauses]
    begun = time.monotonic()
    with stopped() as still:
        for moment, target, stops in sorted(moments):
            time.sleep(max(0.0, begun + moment - time.monotonic()))
            if stops:
                still[target] = pids(running, target, draw)
                send(signal.SIGSTOP, still[target])
            else:
                send(signal.SIGCONT, still.pop(target))


def submitted(running: Platform) -> dict[str, str]:
    """A run of each mode."""
    return {
        mode: running.submit(
            run_config(advanced={"max_steps": STEPS, "execution_mode": mode, **more}), workspace="w"
        )
        for mode, more in MODES.items()
    }


def test_runs_through_pauses_of_everybody_end_with_the_same_bits(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    workspace = make_workspace(tmp_path / "workspace")
    with platform(tmp_path / "home", environment={"HEADRACE_WORKERS": "two"}) as running:
        running.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
        running.upload("numbers")
        calm = {
            mode: final_adapter(running.wait(run, "finished", within_s=60 + 2 * STEPS))
            for mode, run in submitted(running).items()
        }
        runs = submitted(running)
        for pauses in rounds(draw):
            carry_out(running, pauses, draw)
            time.sleep(draw.uniform(0.2, 1.5))
        for mode, run in runs.items():
            info = running.wait(run, "finished", within_s=120 + 2 * STEPS)
            assert final_adapter(info) == calm[mode], mode
            check(running.events(run), steps=STEPS, groups=2, samples=4)
