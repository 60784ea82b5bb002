"""B11, learning: held-out reward over the steps of the demo's task, compared with TRL in the same
settings.

The base model is made once, by the demo's supervised run on the platform. Both sides and all seeds begin
with its files. A seed is the order of the questions, the adapter's first values and the draws of the
sampling. At each step both sides train on the same questions. Our side is the whole platform, from the
run's request to its end: Postgres, control process, worker, and the user's grader in a process of its
own. The platform takes the single turn itself, as TRL does (the demo's user code would add one request
per sample). TRL's side (from `make oracles`) is one process, from the begin of the first step to the end
of the last one; imports and loading are not counted. Both answer the held-out questions greedily within
that time.

Each seed of each side is a line of --directory/b11.jsonl, and the same command continues where it
stopped. --plot draws the curves (it needs headrace[bench]). Exits with 1 unless the curves are the same
within noise (the seeds' mean and the last point of the curve differ by at most twice the standard error
of the difference) and ours took less time.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from uuid import uuid4

from bench.b1_trl import cpu_seconds
from bench.matrix import Config, register_workspace, run_to_end, upload_once
from infra.readmodel.estimates import MeanEstimate, estimate_mean
from producers.cli.config_files import read_config
from producers.cli.scaffold import scaffold
from tests.kit.platform import Platform, git, platform
from trainer.schedule import step_rows

SIDES = {"headrace": "Headrace", "trl": "TRL GRPOTrainer"}
BASE = "b11-base"
CONFIGS = Path(__file__).parent.parent / "examples" / "arithmetic" / "configs" / "training"


@dataclass(frozen=True, slots=True)
class Curve:
    """One seed of one side: (step, held-out reward) from step 0 on; what all of it took."""

    side: str
    seed: int
    held_out: tuple[tuple[int, float], ...]
    wall_s: float
    cpu_s: float
    load: float

    @property
    def steps(self) -> int:
        return self.held_out[-1][0]

    @property
    def last(self) -> float:
        return self.held_out[-1][1]

    @property
    def mean(self) -> float:
        """Of the points after the first, which is the base model's."""
        return statistics.mean(reward for _, reward in self.held_out[1:])


def settings(seed: int, *, steps: int, every: int) -> Config:
    """The demo's GRPO run at a constant learning rate, for both sides. It is a fifth of the demo's
    highest, with which all is learned within five steps."""
    config: Config = read_config(CONFIGS / "grpo.toml")
    config["advanced"] |= {"seed": seed, "max_steps": steps, "lr_schedule": "constant"}
    config["advanced"]["warmup_steps"] = 0
    config["training"]["lr"] = 2e-4
    config["checkpoints"] = {"eval_interval": every, "checkpoint_save_freq": steps}
    return config


class Bench:
    """Data and base model below `root`, on a platform."""

    def __init__(self, up: Platform, root: Path, *, steps: int, every: int) -> None:
        self._up, self._root, self._steps, self._every = up, root, steps, every
        _stop_leftovers(up)
        self._data = root / "workspace" / "data"
        if not self._data.exists():
            scaffold(root / "workspace", seed=0)
            main = root / "workspace" / "rollouts" / "arithmetic" / "main.py"
            main.write_text(main.read_text().replace("class Solve(AgentWorkflow)", "class Solve"))
            git(root / "workspace", "commit", "-qam", "The platform takes the turn")
        register_workspace(up, root / "workspace")
        for name in ("arithmetic-sft", "arithmetic-rl", "arithmetic-heldout"):
            upload_once(up, name, (self._data / f"{name}.jsonl").read_text())

    def _base(self) -> Path:
        """The base model's files, made when first asked for."""
        model = self._root / "model"
        if not model.exists():
            info = run_to_end(self._up, read_config(CONFIGS / "sft.toml"), BASE, limit_s=3600)
            at, scratch = f"/checkpoints/{info['run']['id']}@last", model.with_suffix(".part")
            for file in self._up.get(at)["checkpoint"]["files"]:
                path = scratch / file["name"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._up.api.get(f"{at}/files/{file['name']}").content)
            scratch.rename(model)
        return model

    def headrace(self, seed: int) -> Curve:
        """A run of the whole platform."""
        config = settings(seed, steps=self._steps, every=self._every)
        config["experiment"]["model_path"] = str(self._base())
        load, before = os.getloadavg()[0], cpu_seconds(self._up)
        name = f"b11-{seed}-{uuid4().hex[:6]}"
        run = self._up.submit(config, workspace="matrix", name=name)
        info = self._up.wait(run, within_s=1200, every_s=2.0)
        used = cpu_seconds(self._up) - before
        assert info["run"]["status"] == "finished", info["run"]
        times = [datetime.fromisoformat(event["time"]) for event in self._up.events(run)]
        points = info["metrics"]["eval/validation/reward"]
        held_out = tuple((point["step"], point["value"]) for point in points)
        wall_s = (times[-1] - times[0]).total_seconds()
        return Curve("headrace", seed, held_out, wall_s, used, load)

    def trl(self, seed: int) -> Curve:
        """TRL, in a process of its own."""
        config = settings(seed, steps=self._steps, every=self._every)
        rows = (self._data / "arithmetic-rl.jsonl").read_text().splitlines()
        batch = int(str(config["training"]["rollout_batch_size"]))
        ordered = [
            rows[row]
            for step in range(1, self._steps + 1)
            for row in step_rows(seed, step=step, batch=batch, num_rows=len(rows))
        ]
        questions = self._root / "questions.jsonl"
        questions.write_text("\n".join(ordered) + "\n")
        load = os.getloadavg()[0]
        command = [
            *(sys.executable, "-W", "ignore", "-m", "bench.theirs_learning", str(self._base())),
            *(str(questions), str(self._data / "arithmetic-heldout.jsonl")),
            *("--every", str(self._every), "--settings", json.dumps(config)),
        ]
        done = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads()},
        )
        said = json.loads(done.stdout.splitlines()[-1])
        held_out = tuple((step, reward) for step, reward in said["held_out"])
        return Curve("trl", seed, held_out, said["wall_s"], said["cpu_s"], load)


def _stop_leftovers(up: Platform) -> None:
    """Runs of a bench that was interrupted go on with the platform, beside what is measured now."""
    for run in up.get("/runs", limit=100)["runs"]:
        if run["status"] in ("pending", "running") and run["name"] != BASE:
            up.post(f"/runs/{run['id']}/stop", {})
            up.wait(run["id"])


def threads() -> str:
    """Of both sides."""
    return os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))


class Ledger:
    """The measurements, one line each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def curves(self, *, steps: int) -> list[Curve]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        said = [json.loads(line) for line in lines]
        found = [
            Curve(**{**one, "held_out": tuple((s, r) for s, r in one["held_out"])}) for one in said
        ]
        return [curve for curve in found if curve.steps == steps]

    def add(self, curve: Curve) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(curve)) + "\n")


def missing(found: Sequence[Curve], seeds: Sequence[int]) -> list[tuple[int, str]]:
    """The measurements that remain: both sides of a seed one after the other, in alternating order."""
    have = {(curve.seed, curve.side) for curve in found}
    order = [
        (seed, side)
        for number, seed in enumerate(seeds)
        for side in (list(SIDES) if number % 2 == 0 else list(reversed(SIDES)))
    ]
    return [one for one in order if one not in have]


def gather(root: Path, seeds: Sequence[int], *, steps: int, every: int) -> Iterator[Curve]:
    """Every curve: those of the ledger, then those that are measured now."""
    root.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(root / "b11.jsonl")
    found = [curve for curve in ledger.curves(steps=steps) if curve.seed in seeds]
    yield from found
    todo = missing(found, seeds)
    if not todo:
        return
    with platform(root / "home", environment={"OMP_NUM_THREADS": threads()}) as up:
        bench = Bench(up, root, steps=steps, every=every)
        for seed, side in todo:
            measured = bench.headrace(seed) if side == "headrace" else bench.trl(seed)
            ledger.add(measured)
            yield measured


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def same(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether two means differ by at most twice the standard error of their difference."""
    (a, a_std), (b, b_std) = spread(ours), spread(theirs)
    error = math.hypot(a_std / math.sqrt(len(ours)), b_std / math.sqrt(len(theirs)))
    return abs(a - b) <= 2 * error


def report(found: Sequence[Curve]) -> bool:
    """Print the tables; whether the curves are the same within noise and ours took less time."""
    sides = {name: [curve for curve in found if curve.side == name] for name in SIDES}
    if not all(sides.values()):
        print("one side has no curve yet")
        return False

    def row(label: str, of: Callable[[Curve], float], digits: int = 3) -> None:
        cells = (spread([of(curve) for curve in sides[name]]) for name in SIDES)
        shown = "".join(f"{mean:16.{digits}f} +-{std:6.{digits}f}" for mean, std in cells)
        print(f"{label:32}{shown}")

    print(f"{'mean +- std over seeds':32}" + "".join(f"{name:>25}" for name in SIDES.values()))
    for number, (step, _) in enumerate(sides["headrace"][0].held_out):
        row(f"held-out reward, step {step}", partial(_point, number=number))
    row("mean of the curve", lambda curve: curve.mean)
    row("wall seconds", lambda curve: curve.wall_s, 1)
    row("CPU seconds", lambda curve: curve.cpu_s, 1)
    ours, theirs = sides["headrace"], sides["trl"]
    seeds = min(len(ours), len(theirs))
    alike = seeds > 1 and all(
        same([of(c) for c in ours], [of(c) for c in theirs])
        for of in (lambda c: c.mean, lambda c: c.last)
    )
    faster = statistics.mean(c.wall_s for c in theirs) / statistics.mean(c.wall_s for c in ours)
    less = statistics.mean(c.cpu_s for c in theirs) / statistics.mean(c.cpu_s for c in ours)
    print(f"wall time {faster:.2f}x less, CPU {less:.2f}x less")
    verdict = "one seed has no noise" if seeds == 1 else "yes" if alike else "NO"
    print(f"the same curve within noise: {verdict}")
    return alike and faster > 1


def _point(curve: Curve, *, number: int) -> float:
    return curve.held_out[number][1]


def means(curves: Sequence[Curve]) -> list[tuple[int, MeanEstimate]]:
    """The mean over seeds at each step, with its interval (Student's t over the seeds)."""
    found = []
    for number, (step, _) in enumerate(curves[0].held_out):
        estimate = estimate_mean([[c.held_out[number][1]] for c in curves], is_proportion=False)
        assert estimate is not None
        found.append((step, estimate))
    return found


def plot(found: Sequence[Curve], path: Path, *, answers: str = "greedy") -> None:
    """Held-out reward over steps: every seed, and the mean of each side with its 95 % interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for color, (side, name) in zip(("tab:blue", "tab:orange"), SIDES.items(), strict=True):
        curves = [curve for curve in found if curve.side == side]
        if not curves:
            continue
        for curve in curves:
            axes.plot(*zip(*curve.held_out, strict=True), color=color, alpha=0.25, linewidth=1)
        steps, estimates = zip(*means(curves), strict=True)
        label = f"{name}, mean of {len(curves)} seeds"
        axes.plot(steps, [e.mean for e in estimates], color=color, label=label)
        if all(e.interval for e in estimates):
            low, high = [e.low for e in estimates], [e.high for e in estimates]
            axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel=f"held-out reward ({answers})")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(".b11"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="write an image")
    given = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        print("B11 needs TRL to compare with; install it with: make oracles")
        return 0
    print(f"B11 learning: {given.steps} steps, seeds {given.seeds}, {threads()} threads")
    print("                last held-out   wall s    CPU s   load before", flush=True)
    found = []
    root = given.directory.resolve()
    for curve in gather(root, given.seeds, steps=given.steps, every=given.every):
        print(
            f"{curve.side:9}{curve.seed:6}{curve.last:14.3f}{curve.wall_s:9.1f}{curve.cpu_s:9.1f}"
            f"{curve.load:14.1f}",
            flush=True,
        )
        found.append(curve)
    if given.plot is not None:
        plot(found, given.plot)
    return 0 if report(found) else 1


if __name__ == "__main__":
    sys.exit(main())
