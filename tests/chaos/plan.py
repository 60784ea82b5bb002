"""What a chaos trial does, as a pure function of (seed, index): so that a long run of trials can be
carried out in parts, and a trial that failed can be done again.

The first trials walk through every failpoint there is, a few at a time; the others kill a random
process at a random moment, several times a run.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infra.failpoints import names
from tests.kit.platform import TINY, run_config

Config = Mapping[str, Mapping[str, Any]]
Shape = Literal["workflow", "graded", "sft"]

TARGETS = ("worker", "worker", "worker", "control", "user", "supervisor")
"""What a random kill hits: workers more often than the rest, for they do the work."""

BATCH = 12
"""Failpoints that are armed at once."""

LATEST_HIT = 3

ONCE = ("sync.", "learn.perform.InitializePolicy.", "verify.", "evaluate.", "lease.")
"""Points that a run passes only once or twice."""

WITH_KAFKA = ("relay.", "reconcile.")
"""Points that nothing passes where the log itself is the bus."""

VALIDATED = {"max_steps": 6, "validation_dataset": "numbers", "state_interval": 2}

CONFIGS: dict[Shape, Config] = {
    "workflow": run_config(advanced=VALIDATED, checkpoints={"eval_interval": 3}),
    "graded": run_config(
        experiment={"rollout": "graded"}, advanced=VALIDATED, checkpoints={"eval_interval": 3}
    ),
    "sft": {
        "experiment": {"model_path": TINY, "dataset": "numbers"},
        "training": {"lr": 1e-3},
        "checkpoints": {"checkpoint_save_freq": 3},
        "advanced": {
            "algorithm": "sft",
            "batch_size": 4,
            "max_steps": 6,
            "state_interval": 2,
            "deterministic": True,
        },
    },
}


@dataclass(frozen=True, slots=True)
class Kill:
    """`kill -9` of a target, so long after the run was submitted."""

    after_s: float
    target: str


@dataclass(frozen=True, slots=True)
class Trial:
    """One run, and what happens to it. `failpoints`: name -> at which pass; those of a trial are
    armed together in a platform of its own."""

    index: int
    shape: Shape
    failpoints: Mapping[str, int]
    kills: tuple[Kill, ...]


def batches(points: Sequence[str]) -> list[tuple[Shape, list[str]]]:
    """The failpoints in groups, each with the shape of run that passes them all."""
    apart = [name for name in points if "GenerateGroup" in name]
    rest = [name for name in points if name not in apart]
    groups: list[tuple[Shape, list[str]]] = [("graded", apart)] if apart else []
    # Dealt like cards, so that the many points of one consumer do not all fall into one run.
    count = -(-len(rest) // BATCH)
    return groups + [("workflow", rest[start::count]) for start in range(count)]


def points(stack: str) -> tuple[str, ...]:
    """The failpoints that a run on this stack passes."""
    return tuple(n for n in names() if stack == "real" or not n.startswith(WITH_KAFKA))


def trial(seed: int, index: int, *, stack: str) -> Trial:
    """Trial number `index` (from 0)."""
    draw = random.Random(f"{seed}/{index}")
    groups = batches(points(stack))
    if index < len(groups):
        shape, armed = groups[index]
        hits = {name: 1 if name.startswith(ONCE) else draw.randint(1, LATEST_HIT) for name in armed}
        return Trial(index, shape, hits, ())
    shape = draw.choice(tuple(CONFIGS))
    kills = [
        Kill(round(draw.uniform(0.0, 2.5), 3), draw.choice(TARGETS))
        for _ in range(draw.randint(2, 4))
    ]
    return Trial(index, shape, {}, tuple(sorted(kills, key=lambda kill: kill.after_s)))
