"""Does it learn? Runs every algorithm in every execution mode that it allows, 20 steps each, on one
platform and from the same weights: `make matrix`. First all algorithms in sync, then the other modes.

A cell has learned when the mean reward of its last five steps is above that of its first five (for an
algorithm that samples nothing: when the held-out reward after is above that before). Held out is
in-training validation, greedy. The platform's home stays in --directory, so the same command continues
where it stopped: a cell whose run has finished is only read. A cell that takes longer than --limit-s is
stopped and reported. Exits with 1 where a cell has not learned.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any, Protocol, get_args

from producers.cli.config_files import read_config
from producers.cli.scaffold import scaffold
from schemas.algorithms import OFFLINE, PAIRS_OF_GROUPS, SCORED
from schemas.config import Algorithm, ExecutionMode
from tests.kit.platform import (
    PATIENCE,
    ROWS,
    Platform,
    make_workspace,
    platform,
    run_config,
)

STEPS, WINDOW = 20, 5
GROUPS, QUESTIONS, LR = 8, 50, 2e-4
"""Of the demo's task: groups of a step, half of the demo's; held-out questions; learning rate, a fifth
of the demo's highest, with which so few groups learn in five steps what they forget in the next five."""
GENTLE = ("dpo", "kto", "simpo")
"""Algorithms that need a tenth of this learning rate: with all of it the chosen answers become less
likely too, and the held-out reward falls."""

Config = dict[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One algorithm in one execution mode."""

    algorithm: str
    mode: str

    @property
    def name(self) -> str:
        return f"matrix-{self.algorithm}-{self.mode}".replace("_", "-")


def cells() -> tuple[Cell, ...]:
    """All there are: an algorithm that samples nothing has no modes, and the offline mode needs groups
    that another run recorded. gdpo needs rewards of several parts, and distill a teacher, which the
    tasks do not have, and a reward model writes no answers that could be graded."""
    return tuple(
        Cell(algorithm, mode)
        for mode in get_args(ExecutionMode)
        for algorithm in get_args(Algorithm)
        if mode != "offline"
        and algorithm not in ("gdpo", "distill", *SCORED)
        and (algorithm not in OFFLINE or mode == "sync")
    )


class Task(Protocol):
    """The task of a cell. `prepare` creates the workspace, the data and the weights that all cells begin
    with."""

    def prepare(self, up: Platform, root: Path) -> None: ...
    def config(self, cell: Cell) -> Config: ...


class Arithmetic:
    """The demo's task, from the demo's base model: sums whose units carry. `base`: a directory with
    that model; None: it is made."""

    BASE, RIGHT, HELD_OUT = "matrix-base", "matrix-right", "matrix-heldout"
    PAIRS = "matrix-pairs"

    def __init__(self, base: Path | None) -> None:
        self._base = base

    def prepare(self, up: Platform, root: Path) -> None:
        workspace = root / "workspace"
        if not workspace.exists():
            scaffold(workspace, seed=0)
        register_workspace(up, workspace)
        for name in ("arithmetic-sft", "arithmetic-rl"):
            upload_once(up, name, (workspace / "data" / f"{name}.jsonl").read_text())
        held_out = (
            (workspace / "data" / "arithmetic-heldout.jsonl").read_text().splitlines(keepends=True)
        )
        upload_once(up, self.HELD_OUT, "".join(held_out[:QUESTIONS]))
        upload_once(up, self.RIGHT, demonstrations(workspace))
        upload_once(up, self.PAIRS, preferences(workspace))
        if self._base is not None:
            return
        sft = self._read("sft")
        sft["experiment"]["model_path"] = "scratch:qwen3-2m"
        print("the base model: the demo's demonstrations", flush=True)
        run_to_end(up, sft, self.BASE, limit_s=3600)

    def config(self, cell: Cell) -> Config:
        """The demo's GRPO run with another algorithm, in smaller steps; sft goes on with demonstrations
        that are right, and the others that sample nothing prefer these to careless ones."""
        config = self._read("grpo")
        config["experiment"]["model_path"] = str(self._base or f"{self.BASE}@last")
        config["training"] |= {"rollout_batch_size": GROUPS, "lr": LR}
        config["advanced"] |= {"algorithm": cell.algorithm, "execution_mode": cell.mode}
        config["advanced"] |= {"max_steps": STEPS, "lr_schedule": "constant", "warmup_steps": 2}
        config["advanced"]["validation_dataset"] = self.HELD_OUT
        config["checkpoints"] = {"eval_interval": STEPS, "checkpoint_save_freq": STEPS}
        if cell.algorithm in OFFLINE:
            config["experiment"]["dataset"] = self.RIGHT if cell.algorithm == "sft" else self.PAIRS
            if cell.algorithm in GENTLE:
                config["training"]["lr"] = LR / 10
            config["advanced"] |= {"batch_size": 64, "max_sequence_length": 64}
            _sampled_no_more(config)
        if cell.algorithm in (*OFFLINE, *PAIRS_OF_GROUPS):
            config["advanced"].pop("kl_coef", None)
        return config

    def _read(self, name: str) -> Config:
        root = Path(__file__).parent.parent / "examples" / "arithmetic" / "configs" / "training"
        return read_config(root / f"{name}.toml")


class Digits:
    """For tests: a tiny model with random weights is paid for saying digits."""

    def prepare(self, up: Platform, root: Path) -> None:
        workspace = root / "workspace"
        register_workspace(up, workspace if workspace.exists() else make_workspace(workspace))
        upload_once(up, "numbers", ROWS)

    def config(self, cell: Cell) -> Config:
        training = {"n_samples_per_prompt": 8, "rollout_batch_size": 4, "max_response_length": 8}
        advanced = {"algorithm": cell.algorithm, "execution_mode": cell.mode, "max_steps": STEPS}
        config = run_config(
            training={"lr": 2e-2, **training},
            advanced={
                **advanced,
                "validation_dataset": "numbers",
                "tuning": "full",
                "deterministic": False,
            },
            checkpoints={"checkpoint_save_freq": STEPS},
        )
        if cell.algorithm in OFFLINE:
            config["advanced"]["batch_size"] = 4
            _sampled_no_more(config)
        return config


def _sampled_no_more(config: Config) -> None:
    """Take out what a run without samples would not read."""
    config.pop("sampling", None)
    for key in ("n_samples_per_prompt", "rollout_batch_size"):
        config["training"].pop(key, None)


def demonstrations(workspace: Path) -> str:
    """The demo's training questions with the working that is right."""
    return _lines(
        {"user_prompt": question, "ground_truth": right}
        for question, right, _ in _worked(workspace)
    )


def preferences(workspace: Path) -> str:
    """The demo's training questions whose careless working is wrong, with the right one as better."""
    return _lines(
        {"prompt": question, "chosen": right, "rejected": careless}
        for question, right, careless in _worked(workspace)
        if right != careless
    )


def _lines(rows: Iterable[Mapping[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _worked(workspace: Path) -> Iterator[tuple[str, str, str]]:
    """Each training question of the demo, with the right working and a careless one."""
    maker = _module(workspace / "data" / "make.py")
    rows = [
        json.loads(line)
        for line in (workspace / "data" / "arithmetic-rl.jsonl").read_text().splitlines()
    ]
    for row in rows:
        a, _, b = row["user_prompt"].removeprefix("What is ").removesuffix("?").split()
        right, careless = (maker.working((int(a), int(b)), careful=c) for c in (True, False))
        yield row["user_prompt"], right, careless


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def register_workspace(up: Platform, workspace: Path) -> None:
    """The workspace is registered, now or since an earlier start."""
    made = up.post("/workspaces", {"url": str(workspace), "name": "matrix"})
    assert made.status_code in (200, 201, 409), made.text


def upload_once(up: Platform, name: str, content: str) -> None:
    if up.api.get(f"/datasets/{name}").status_code == 404:
        up.upload(name, content)


def run_to_end(up: Platform, config: Mapping[str, object], name: str, *, limit_s: float) -> Any:
    """The info of a run of this name: of one that has finished before, else of one that is made now. A
    run that ends otherwise, or not in time, leaves its name behind."""
    name = _free(up, name)
    found = up.api.get(f"/runs/{name}")
    run = name if found.is_success else up.submit(config, workspace="matrix", name=name)
    try:
        return up.wait(run, within_s=limit_s / PATIENCE)
    except AssertionError:
        up.post(f"/runs/{run}/stop", {})
        up.wait(run, within_s=60)
        return None


def _free(up: Platform, name: str) -> str:
    """`name`, or with a number where runs of that name have failed or were stopped."""
    number = 1
    while True:
        wanted = name if number == 1 else f"{name}-{number}"
        found = up.api.get(f"/runs/{wanted}")
        status = found.json()["run"]["status"] if found.is_success else "free"
        if status not in ("failed", "crashed", "stopped", "killed"):
            return wanted
        number += 1


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a cell. None: this figure was not measured."""

    cell: Cell
    status: str
    first: float | None = None
    last: float | None = None
    before: float | None = None
    after: float | None = None
    steps_s: float | None = None

    @property
    def learned(self) -> bool:
        """Whether it ended better than it began."""
        pair = (self.first, self.last) if self.last is not None else (self.before, self.after)
        return pair[0] is not None and pair[1] is not None and pair[1] > pair[0]


def result(cell: Cell, info: Any) -> Result:
    """A run's info as a row of the table."""
    if info is None:
        return Result(cell, "over time")
    metrics = info["metrics"]
    rewards = [point["value"] for point in metrics.get("rollout/raw_reward", ())]
    held_out = [point["value"] for point in metrics.get("eval/validation/reward", ())]
    return Result(
        cell,
        info["run"]["status"],
        first=mean(rewards[:WINDOW]) if rewards else None,
        last=mean(rewards[-WINDOW:]) if rewards else None,
        before=held_out[0] if held_out else None,
        after=held_out[-1] if len(held_out) > 1 else None,
        steps_s=_pace(metrics.get("train/loss", ())),
    )


def _pace(points: Sequence[Mapping[str, Any]]) -> float | None:
    """Steps per second, from the first step to the last."""
    times = [datetime.fromisoformat(point["at"]) for point in points]
    seconds = (times[-1] - times[0]).total_seconds() if times else 0.0
    return (len(times) - 1) / seconds if seconds > 0 else None


def matrix(
    root: Path, task: Task, chosen: Sequence[Cell], *, limit_s: float, workers: str = "one"
) -> Iterator[Result]:
    """Run the cells one after the other on a platform whose home is below `root`."""
    root.mkdir(parents=True, exist_ok=True)
    with platform(root / "home", environment={"HEADRACE_WORKERS": workers}) as up:
        task.prepare(up, root)
        for cell in chosen:
            info = run_to_end(up, task.config(cell), cell.name, limit_s=limit_s)
            yield result(cell, info)


def show(found: Result) -> None:
    """A row of the table."""
    figures = (found.first, found.last, found.before, found.after, found.steps_s)
    shown = "".join(f"{'-':>9}" if value is None else f"{value:9.3f}" for value in figures)
    verdict = "yes" if found.learned else "NO"
    print(
        f"{found.cell.algorithm:22}{found.cell.mode:20}{shown}  {verdict:4}{found.status}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(".matrix"))
    parser.add_argument("--only", nargs="*", help="these algorithms only")
    parser.add_argument("--limit-s", type=float, default=300, help="of one cell")
    parser.add_argument(
        "--base", type=Path, help="a directory with the demo's base model, which is then not made"
    )
    parser.add_argument("--workers", choices=["one", "two"], default="one")
    given = parser.parse_args()
    chosen = [cell for cell in cells() if not given.only or cell.algorithm in given.only]
    print(f"{len(chosen)} cells of {STEPS} steps, load {os.getloadavg()[0]:.1f}", flush=True)
    directory = given.directory.resolve()
    head = ("first 5", "last 5", "before", "after", "steps/s")
    print(f"{'':42}{'reward':>18}{'held out':>18}")
    print(f"{'algorithm':22}{'mode':20}" + "".join(f"{h:>9}" for h in head) + "  up?")
    failed = 0
    task = Arithmetic(given.base and given.base.resolve())
    for found in matrix(directory, task, chosen, limit_s=given.limit_s, workers=given.workers):
        show(found)
        failed += not found.learned
    print(f"{len(chosen) - failed} of {len(chosen)} cells have learned")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
