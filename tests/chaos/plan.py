"""The plan of a chaos trial, as a pure function of (seed, index), so that a long run of trials can be
carried out in parts, and a trial that failed can be done again.

In mode `kills` the first trials walk through every failpoint, a few at a time. All other trials do
what their mode says, at random moments, several times during one run.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from infra.failpoints import names
from tests.kit.platform import TINY, run_config

Config = Mapping[str, Mapping[str, Any]]
Shape = Literal["workflow", "graded", "sft", "one_step_off_async", "fully_async"]
Mode = Literal["kills", "twice", "freeze", "children"]

MODES: tuple[Mode, ...] = get_args(Mode)

TARGETS = ("worker", "worker", "worker", "control", "user", "supervisor")
"""The targets of random kills. Workers are hit more often than the rest, because they do the work."""

JOIN = "join"
"""Instead of a kill: the second platform leaves in order and joins again."""

TWICE = (*TARGETS, JOIN)

CHILDREN = (
    *("git", "git", "git", "user", "user", "discover", "forkserver", "worker", "control"),
    *("backend", "backend", "auxiliary", "postmaster"),
)
"""Every kind of process that another one starts. Git's are short-lived: they are tried more often."""

FROZEN = ("worker", "worker", "worker", "control", "user", "database", "database", "backend")
"""The targets of pauses. `database` is the server with all its processes, `backend` one connection's."""

WITH_BROKER = {"children": ("broker",), "freeze": ("broker",)}
"""Additional targets on the real stack."""

LAYOUTS = ("one", "two", "each")
"""HEADRACE_WORKERS: which processes host the consumers."""

BLOCK = 8
"""So many trials in a row share a layout: to change it, the processes must be started again."""

BATCH = 12
"""Failpoints that are armed at once."""

LATEST_HIT = 3

ONCE = ("sync.", "learn.perform.InitializePolicy.", "verify.", "evaluate.", "lease.")
"""Points that a run passes only once or twice."""

WITH_KAFKA = ("relay.", "reconcile.")
"""Points that nothing passes where the log itself is the bus."""

OF_ENDED_RUNS = ("archive.",)
"""Points that no run passes: tests/e2e/test_retention.py kills there."""

OF_PUSHES = ("webhook.", "trigger.", "status.", "sync.perform.ListRefs.")
"""Points that no submitted run passes: tests/crash/scenarios/push.py and webhook.py kill there."""

OF_GIVEN_SECRETS = ("submit.secrets_given",)
"""The point that no run without secrets of its own passes: tests/crash/scenarios/given_secrets.py kills
there."""

OF_UPLOADS = ("upload.", "artifact.", "from_run.")
"""Points where datasets and artifacts are made: tests/e2e/test_uploads.py and tests/e2e/test_from_run.py
kill there."""

OF_JUDGES = ("judge.",)
"""Points that no run without a rubric passes: tests/crash/scenarios/judge.py kills there."""

VALIDATED = {"max_steps": 6, "validation_dataset": "numbers", "state_interval": 2}
EVALUATED = {"eval_interval": 3}

OF_DEPLOYMENTS = ("deploy.",)
"""Points of deployments, which `tests/crash/scenarios/deploy.py` passes."""
OF_HUBS = ("publish.", "hub.")
"""Points of pushes to a model hub, which `tests/crash/scenarios/hub.py` passes."""
OF_FORKS = ("rollout.perform.ReplayGroup.",)
"""Points that only a fork passes which takes recorded samples: tests/crash/scenarios/fork.py kills
there."""
OF_REGRADES = ("regrade.", "compare.")
"""Points of regrades, which `tests/crash/scenarios/regrade.py` passes."""
OF_PACKAGES = ("sync.perform.DiscoverRollouts.",)
"""Points that no run of a rollout without packages passes: tests/crash/scenarios/package.py kills
there."""

CONFIGS: dict[Shape, Config] = {
    "workflow": run_config(advanced=VALIDATED, checkpoints=EVALUATED),
    "graded": run_config(
        experiment={"rollout": "graded"}, advanced=VALIDATED, checkpoints=EVALUATED
    ),
    "one_step_off_async": run_config(
        advanced={**VALIDATED, "execution_mode": "one_step_off_async"}, checkpoints=EVALUATED
    ),
    "fully_async": run_config(
        experiment={"rollout": "graded"},
        advanced={
            **VALIDATED,
            "execution_mode": "fully_async",
            "max_steps_off_policy": 3,
            "weight_sync_interval": 2,
        },
        checkpoints=EVALUATED,
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
    """`kill -9` of a target, so many seconds after the run was submitted."""

    after_s: float
    target: str


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP of several targets at the same moment, each continued after its own time (seconds)."""

    after_s: float
    stops: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """One run, and what happens to it. `failpoints`: name -> at which pass; those of a trial are
    armed together in a platform of its own. `layout`: how the consumers are spread over processes."""

    index: int
    shape: Shape
    failpoints: Mapping[str, int]
    faults: tuple[Kill | Pause, ...]
    layout: str = "one"


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
    elsewhere = (
        *(*OF_ENDED_RUNS, *OF_PUSHES, *OF_GIVEN_SECRETS, *OF_UPLOADS, *OF_JUDGES),
        *(*OF_PACKAGES, *OF_DEPLOYMENTS, *OF_HUBS, *OF_FORKS, *OF_REGRADES),
    )
    absent = elsewhere if stack == "real" else (*elsewhere, *WITH_KAFKA)
    return tuple(name for name in names() if not name.startswith(absent))


def trial(seed: int, index: int, *, stack: str, mode: Mode = "kills") -> Trial:
    """Trial number `index` (from 0) of a mode."""
    draw = random.Random(f"{seed}/{index}" if mode == "kills" else f"{mode}/{seed}/{index}")
    groups = batches(points(stack)) if mode == "kills" else []
    if index < len(groups):
        shape, armed = groups[index]
        hits = {name: 1 if name.startswith(ONCE) else draw.randint(1, LATEST_HIT) for name in armed}
        return Trial(index, shape, hits, ())
    shape = draw.choice(tuple(CONFIGS))
    faults = [_fault(draw, mode, stack) for _ in range(draw.randint(2, 4))]
    ordered = tuple(sorted(faults, key=lambda fault: fault.after_s))
    return Trial(index, shape, {}, ordered, layout(seed, index, mode=mode))


def layout(seed: int, index: int, *, mode: Mode) -> str:
    """The layout of a trial's processes, the same for a block of trials."""
    if mode in ("kills", "children"):
        return "one"
    return LAYOUTS[(random.Random(f"{mode}/{seed}/layout").randrange(3) + index // BLOCK) % 3]


def _fault(draw: random.Random, mode: Mode, stack: str) -> Kill | Pause:
    targets: tuple[str, ...] = {
        "kills": TARGETS,
        "twice": TWICE,
        "children": CHILDREN,
        "freeze": FROZEN,
    }[mode]
    if stack == "real":
        targets += WITH_BROKER.get(mode, ())
    if mode == "freeze":
        return _pause(draw, targets)
    latest = 4.0 if mode == "children" else 2.5  # a workspace that is fetched comes before the run
    return Kill(round(draw.uniform(0.0, latest), 3), draw.choice(targets))


def _pause(draw: random.Random, targets: Sequence[str]) -> Pause:
    """One to four different processes, and each for a time of its own: a process that wakes up while
    another one still stands is what makes a pause dangerous."""
    drawn = draw.choices(targets, k=draw.randint(1, 4))
    stops = tuple((target, round(draw.uniform(1.0, 10.0), 2)) for target in drawn)
    return Pause(round(draw.uniform(0.0, 5.0), 3), stops)
