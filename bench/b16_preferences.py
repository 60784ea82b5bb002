"""B16, preferences: DPO on SmolLM2-135M-Instruct, with TRL's DPOTrainer beside it in the same settings.
`make smollm-dpo` runs it.

The pairs are made here: sums of two numbers, and three numbers to sort. The chosen answer is right, and
the rejected one is a wrong answer of the same form. A question is held out by its hash. Both sides learn
the same tokens in the same order, and measure the held-out accuracy and margin (of implicit rewards)
before the first step, every few steps and after the last. At step 0 policy and reference are equal, so
every pair is a tie, which neither side counts as right. A seed is the order of the pairs and the
adapter's first values.

Our side is the whole platform, from the run's request to its end. TRL's side is a process of its own
(`bench/theirs_preferences.py`), from the begin of training to its end. Each seed of each side is a line
of --directory/b16.jsonl, and the same command continues where it stopped. Exits with 1 unless the
accuracies and margins are the same within noise: over the seeds, the means of the curves and their last
points differ by at most twice the standard error of the difference. Without TRL (`make oracles`), or
with --only headrace, it measures our side alone.
"""

import argparse
import asyncio
import hashlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from bench.b1_trl import cpu_seconds
from bench.b11_learning import Curve, missing, same, spread, threads
from bench.b11_smollm import MODEL
from bench.matrix import Config, upload_once
from infra.sandbox.environments.local import load_settings, open_environments
from infra.sandbox.package_models import ModelPackage, fetch_model
from tests.kit.platform import Platform, platform
from trainer.model.dequantize import dequantize_once
from trainer.schedule import step_rows

NAMES = {"headrace": "Headrace", "trl": "TRL DPOTrainer"}
PAIRS_PER_STEP, HELD_OUT = 8, 32
SYSTEM = "Answer."

Pair = tuple[str, str, str]
"""A question, the right answer and a wrong one of the same form."""


def make_pair(number: int) -> Pair:
    """The pair of a number, always the same: a sum whose wrong answer is near, or three numbers of which
    the wrong answer leaves two neighbours in the wrong order."""
    draws = random.Random(number)
    if number % 2:
        first, second = draws.randrange(10, 50), draws.randrange(10, 50)
        right = first + second
        wrong = right + draws.choice((-10, -2, -1, 1, 2, 10))
        return f"{first} + {second}", str(right), str(wrong)
    numbers = draws.sample(range(10, 100), 3)
    ordered = sorted(numbers)
    wrong_order, place = list(ordered), draws.randrange(2)
    wrong_order[place : place + 2] = reversed(wrong_order[place : place + 2])
    question, right_text, wrong_text = (
        " ".join(map(str, some)) for some in (numbers, ordered, wrong_order)
    )
    return f"Sort {question}", right_text, wrong_text


def is_held_out(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % 4 == 0


def make_pairs(*, held_out: bool) -> Iterator[Pair]:
    """The pairs of a split, each question once, without an end."""
    seen: set[str] = set()
    number = 0
    while True:
        pair = make_pair(number)
        number += 1
        if pair[0] not in seen and is_held_out(pair[0]) == held_out:
            seen.add(pair[0])
            yield pair


def row_of(pair: Pair) -> str:
    """A pair in TRL's columns, as a line of JSON."""
    question, chosen, rejected = pair
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    answers = {"chosen": chosen, "rejected": rejected}
    said = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    return json.dumps({"prompt": prompt, **said})


def rows_of(*, steps: int, held_out: bool) -> list[str]:
    """The rows of a split: as many as the steps train, each once, or HELD_OUT."""
    pairs = make_pairs(held_out=held_out)
    return [row_of(next(pairs)) for _ in range(HELD_OUT if held_out else steps * PAIRS_PER_STEP)]


def settings(seed: int, *, steps: int, every: int, model: Path) -> Config:
    """The run, for both sides."""
    return {
        "experiment": {"model_path": str(model), "dataset": f"b16-train-{steps}"},
        "training": {"lr": 2e-4},
        "checkpoints": {"eval_interval": every, "checkpoint_save_freq": steps},
        "advanced": {
            "algorithm": "dpo",
            "beta": 0.1,
            "batch_size": PAIRS_PER_STEP,
            "max_steps": steps,
            "max_sequence_length": 128,
            "seed": seed,
            "tuning": "lora",
            "lora_rank": 16,
            "lora_alpha": 32.0,
            "lora_targets": "all-linear",
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "grad_clip": 1.0,
            "validation_dataset": f"b16-held-out-{HELD_OUT}",
        },
    }


@dataclass(frozen=True, slots=True)
class PairCurve(Curve):
    """One seed of one side: (step, held-out accuracy) in `held_out`, and (step, margin). `tokens` are
    the tokens of all answers that were learned."""

    margins: tuple[tuple[int, float], ...] = ()
    tokens: int = 0

    @property
    def last_margin(self) -> float:
        return self.margins[-1][1]

    @property
    def mean_margin(self) -> float:
        """Of the points after the first, which is 0."""
        return statistics.mean(margin for _, margin in self.margins[1:])


class PairLedger:
    """The measurements, one line each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def curves(self, *, steps: int) -> list[PairCurve]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        found = [_read_curve(json.loads(line)) for line in lines]
        return [curve for curve in found if curve.steps == steps]

    def add(self, curve: PairCurve) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(curve)) + "\n")


def _read_curve(said: dict[str, object]) -> PairCurve:
    points = {name: tuple(map(tuple, said[name])) for name in ("held_out", "margins")}  # type: ignore[call-overload]  # JSON
    return PairCurve(**{**said, **points})  # type: ignore[arg-type]  # JSON


class Bench:
    """Both sides, with model and data below `root`."""

    def __init__(self, root: Path, model: Path, *, steps: int, every: int) -> None:
        self._root, self._model, self._steps, self._every = root, model, steps, every
        self._train = rows_of(steps=steps, held_out=False)
        self._held_out = rows_of(steps=steps, held_out=True)

    def headrace(self, seed: int) -> PairCurve:
        """A run of a whole platform."""
        config = settings(seed, steps=self._steps, every=self._every, model=self._model)
        with platform(self._root / "home", environment={"OMP_NUM_THREADS": threads()}) as up:
            for run in up.get("/runs", limit=100)["runs"]:
                if run["status"] in ("pending", "running"):
                    up.post(f"/runs/{run['id']}/stop", {})
                    up.wait(run["id"])
            for name, rows in (
                (config["experiment"]["dataset"], self._train),
                (config["advanced"]["validation_dataset"], self._held_out),
            ):
                upload_once(up, str(name), "".join(f"{row}\n" for row in rows))
            return self._measure(up, config, seed)

    def _measure(self, up: Platform, config: Config, seed: int) -> PairCurve:
        load, before = os.getloadavg()[0], cpu_seconds(up)
        run = up.submit(config, name=f"b16-{seed}-{uuid4().hex[:6]}")
        info = up.wait(run, within_s=3600, every_s=5.0)
        used = cpu_seconds(up) - before
        times = [datetime.fromisoformat(event["time"]) for event in up.events(run)]
        accuracies, margins, tokens = (
            tuple((point["step"], point["value"]) for point in info["metrics"][key])
            for key in (
                "eval/validation/accuracy",
                "eval/validation/margin",
                "train/learned_tokens",
            )
        )
        wall_s = (times[-1] - times[0]).total_seconds()
        learned = int(sum(value for _, value in tokens))
        return PairCurve("headrace", seed, accuracies, wall_s, used, load, margins, learned)

    def trl(self, seed: int) -> PairCurve:
        """TRL, in a process of its own, on the directory that Headrace makes of the model's file."""
        model = dequantize_once(self._model, self._root / "dequantized").directory
        config = settings(seed, steps=self._steps, every=self._every, model=model)
        order = [
            self._train[row]
            for step in range(1, self._steps + 1)
            for row in step_rows(seed, step=step, batch=PAIRS_PER_STEP, num_rows=len(self._train))
        ]
        files = {"train": order, "held_out": self._held_out}
        for name, rows in files.items():
            (self._root / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows))
        load = os.getloadavg()[0]
        command = [
            *(sys.executable, "-W", "ignore", "-m", "bench.theirs_preferences", str(model)),
            *(str(self._root / f"{name}.jsonl") for name in files),
            *("--settings", json.dumps(config)),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads()}
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        said = json.loads(done.stdout.splitlines()[-1])
        return _read_curve({**said, "side": "trl", "seed": seed, "load": load})


def report(found: Sequence[PairCurve]) -> bool:
    """Print the table. Returns whether the curves of both sides are the same within noise."""
    sides = {side: [c for c in found if c.side == side] for side in NAMES}
    for side, curves in sides.items():
        if not curves:
            print(f"{NAMES[side]}: not measured")
            continue
        print(f"{NAMES[side]}, {len(curves)} seeds: held-out accuracy, margin (mean +- std)")
        for at, (step, _) in enumerate(curves[0].held_out):
            accuracy, margin = (
                spread([of[at][1] for of in values])
                for values in ([c.held_out for c in curves], [c.margins for c in curves])
            )
            print(f"  step {step:3}  {_shown(accuracy)}  {_shown(margin)}")
        walls, cpus = spread([c.wall_s for c in curves]), spread([c.cpu_s for c in curves])
        loads = ", ".join(f"{c.load:.1f}" for c in curves)
        print(f"  wall s {_shown(walls, 0)}; CPU s {_shown(cpus, 0)}; load before {loads}")
    ours, theirs = sides["headrace"], sides["trl"]
    if min(len(ours), len(theirs)) < 2:
        print("the same within noise: not known, it takes two seeds of each side")
        return False
    alike = {
        "accuracy, mean of the curve": same([c.mean for c in ours], [c.mean for c in theirs]),
        "accuracy, last": same([c.last for c in ours], [c.last for c in theirs]),
        "margin, mean of the curve": same(
            [c.mean_margin for c in ours], [c.mean_margin for c in theirs]
        ),
        "margin, last": same([c.last_margin for c in ours], [c.last_margin for c in theirs]),
        "tokens of the answers": {c.tokens for c in ours} == {c.tokens for c in theirs},
    }
    for figure, is_same in alike.items():
        print(f"the same within noise, {figure}: {'yes' if is_same else 'NO'}")
    return all(alike.values())


def _shown(value: tuple[float, float], digits: int = 3) -> str:
    return f"{value[0]:.{digits}f} +- {value[1]:.{digits}f}"


async def fetch(root: Path) -> Path:
    """The model's file, fetched below `root` unless it is there."""
    async with open_environments(load_settings()) as environments:
        found = await fetch_model(
            ModelPackage.parse(MODEL), root / "models", environments, pick=None
        )
    return found.path


def measure(root: Path, given: argparse.Namespace) -> list[PairCurve]:
    """Every curve: those of the ledger, then those that are measured now."""
    ledger = PairLedger(root / "b16.jsonl")
    found = [c for c in ledger.curves(steps=given.steps) if c.seed in given.seeds]
    todo = [one for one in missing(found, given.seeds) if one[1] in given.only]
    if todo:
        model = asyncio.run(fetch(root))
        bench = Bench(root, model, steps=given.steps, every=given.every)
        for seed, side in todo:
            measured = bench.headrace(seed) if side == "headrace" else bench.trl(seed)
            ledger.add(measured)
            found.append(measured)
            print(f"{side} seed {seed}: {measured.held_out}, {measured.wall_s:.0f} s", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(".smollm-dpo"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--only", choices=list(NAMES), nargs="+", default=list(NAMES))
    given = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        print("TRL is not installed, so only Headrace is measured; install it with: make oracles")
        given.only = [side for side in given.only if side != "trl"]
    print(f"B16: {given.steps} steps, seeds {given.seeds}, {threads()} threads", flush=True)
    root = given.directory.resolve()
    root.mkdir(parents=True, exist_ok=True)
    return 0 if report(measure(root, given)) else 1


if __name__ == "__main__":
    sys.exit(main())
