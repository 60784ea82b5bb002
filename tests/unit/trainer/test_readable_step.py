"""The README says that the algorithm is one readable file. So every step of every algorithm that learns
from rewards is a call of `step` in that file, and its gradients and updates happen within that call."""

import math
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch

from schemas.algorithms import PAIRS_OF_GROUPS, PREFERENCE
from schemas.learner import LearnerJob, Preference, StepBatch
from tests.unit.trainer.support import job
from tests.unit.trainer.test_learner import play, talk
from tests.unit.trainer.variants import VARIANTS
from trainer import grpo
from trainer.algorithms import sft
from trainer.algorithms.registry import OBJECTIVES
from trainer.engine import Engine
from trainer.preferences import step as preferences

ROOT = Path(__file__).resolve().parents[3]
STORY = ("step", "prepare_batch", "accumulate_gradients", "micro_batch_loss")
"""The functions of a step, in the order of the file."""


def is_running(code: CodeType) -> bool:
    """Whether a call of this function is on the stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


@contextmanager
def work_seen(monkeypatch: pytest.MonkeyPatch, code: CodeType) -> Iterator[dict[str, list[bool]]]:
    """Every backward pass and every AdamW step until the block ends, and whether `code` ran it."""
    seen: dict[str, list[bool]] = {"backward": [], "update": []}

    def watched(key: str, work: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            seen[key].append(is_running(code))
            return work(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", watched("backward", torch.Tensor.backward))
        patch.setattr(torch.optim.AdamW, "step", watched("update", torch.optim.AdamW.step))
        yield seen


async def calls_of(engine: Engine, path: str | None, work: Awaitable[object]) -> list[str]:
    """The functions of a file that run on the device's thread while `work` is awaited."""
    seen: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == path:
            seen.append(frame.f_code.co_name)

    await engine._device.run(sys.settrace, trace)
    try:
        await work
    finally:
        await engine._device.run(sys.settrace, None)
    return seen


def test_the_readme_names_the_file() -> None:
    named = re.search(r"algorithm is one readable file\W+(trainer/\w+\.py)", readme())
    assert named is not None
    assert ROOT / named[1] == Path(grpo.__file__)


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_the_functions_stand_in_the_file_in_the_order_in_which_they_run() -> None:
    text = Path(grpo.__file__).read_text()
    places = [text.index(f"\ndef {name}(") for name in (*STORY, "advantages", "loss")]
    assert places == sorted(places)


def test_every_objective_is_among_the_variants() -> None:
    assert {job(**keys).config.advanced.algorithm for keys in VARIANTS.values()} == {*OBJECTIVES}


async def stepped(engine: Engine, asked: LearnerJob, batch: StepBatch) -> None:
    await engine.learner.initialize(asked)
    await engine.learner.step(asked, batch, export_state=False)


@pytest.mark.parametrize("variant", VARIANTS)
async def test_every_step_of_every_objective_is_a_call_of_that_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    asked = job(micro_batch_tokens=24, **VARIANTS[variant])
    with work_seen(monkeypatch, grpo.step.__code__) as seen:
        calls = await calls_of(engine, grpo.__file__, stepped(engine, asked, play(1)))
    advanced, groups = asked.config.advanced, len(play(1).groups)
    at_once = (advanced.minibatch_size or 9999) // asked.config.training.n_samples_per_prompt
    updates = advanced.updates_per_step * math.ceil(groups / at_once)
    assert len(seen["backward"]) > updates, "several micro-batches"
    assert all(seen["backward"])
    assert seen["update"] == [True] * updates * (2 if variant.startswith("ppo") else 1)
    order = [name for name in calls if name in STORY]
    assert list(dict.fromkeys(order)) == list(STORY)
    assert order.count("step") == 1
    assert order.count("accumulate_gradients") == updates
    assert order.count("micro_batch_loss") == len(seen["backward"])


@pytest.mark.parametrize("algorithm", [*PREFERENCE, *PAIRS_OF_GROUPS])
async def test_a_step_of_preferences_is_a_call_of_their_step_and_of_no_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    asked = job(algorithm=algorithm)
    rows = tuple(Preference(n, (("user", f"{n}?"),), "yes", "no way") for n in range(2))
    batch = StepBatch(1, preferences=rows) if algorithm in PREFERENCE else play(1)
    with (
        work_seen(monkeypatch, preferences.step.__code__) as own,
        work_seen(monkeypatch, grpo.step.__code__) as other,
    ):
        calls = await calls_of(engine, preferences.__file__, stepped(engine, asked, batch))
    assert own == {"backward": [True], "update": [True]}
    assert other == {"backward": [False], "update": [False]}
    assert calls.count("step") == 1
    assert calls.count("micro_batch_loss") == 1


async def test_a_step_of_sft_is_a_call_of_its_own_step_and_of_no_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its work happens outside of `grpo.step`, and the check above would see that."""
    asked = job(algorithm="sft")
    with (
        work_seen(monkeypatch, sft.step.__code__) as own,
        work_seen(monkeypatch, grpo.step.__code__) as other,
    ):
        calls = await calls_of(engine, sft.__file__, stepped(engine, asked, talk(1)))
    assert own == {"backward": [True], "update": [True]}
    assert other == {"backward": [False], "update": [False]}
    assert calls.count("step") == 1
