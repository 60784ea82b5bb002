"""B17, distillation: a checkpoint that RL has trained teaches SmolLM2-135M-Instruct, the model that it
began with. `make smollm-distill` runs it.

The teacher of a seed is the last checkpoint of the run that `make smollm` makes of it, in the same
directory; where there is none yet, it is trained first. The student samples in the same settings, and
learns from the teacher without a reward. Held-out questions are those of `make smollm`, answered at
temperature 1. Each student is a line of --directory/b17.jsonl, and the same command continues where it
stopped. Exits with 1 unless the students' last held-out rewards are those of their teachers within
noise: over several seeds, the means differ by at most twice the standard error of the difference.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from bench.b11_learning import Curve, Ledger, same, threads
from bench.b11_smollm import Bench, prepare, print_curve, settings


def measure(root: Path, given: argparse.Namespace) -> dict[str, list[Curve]]:
    """The curves of teachers and students, in the order of the seeds."""
    taught, learned = Ledger(root / "b11.jsonl"), Ledger(root / "b17.jsonl")
    model = asyncio.run(
        prepare(root, settings(0, steps=given.steps, every=given.every, model=root))
    )
    bench = Bench(root, model, steps=given.steps, every=given.every)
    found: dict[str, list[Curve]] = {"teacher": [], "student": []}
    for seed in given.seeds:
        teacher = _of_seed(taught, seed, given.steps)
        if teacher is None:
            teacher = bench.headrace(seed)
            taught.add(teacher)
        student = _of_seed(learned, seed, given.steps)
        if student is None:
            student = bench.student(seed)
            learned.add(student)
        for side, curve in (("teacher", teacher), ("student", student)):
            found[side].append(curve)
            print(f"{side} {seed}: {curve.held_out}, {curve.cpu_s:.0f} CPU s", flush=True)
    return found


def _of_seed(ledger: Ledger, seed: int, steps: int) -> Curve | None:
    return next(
        (c for c in ledger.curves(steps=steps) if c.seed == seed and c.side == "headrace"), None
    )


def report(found: dict[str, list[Curve]]) -> bool:
    """Print both curves. Returns whether the students' last held-out rewards are their teachers'."""
    for side, curves in found.items():
        print_curve(f"{side}s", curves)
    if len(found["student"]) == 1:
        print("one seed has no noise to compare with")
        return True
    alike = same(*([c.last for c in curves] for curves in found.values()))
    print(f"students as good as their teachers, within noise: {'yes' if alike else 'NO'}")
    return alike


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(".smollm"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    given = parser.parse_args()
    print(f"B17: {given.steps} steps, seeds {given.seeds}, {threads()} threads", flush=True)
    root = given.directory.resolve()
    root.mkdir(parents=True, exist_ok=True)
    return 0 if report(measure(root, given)) else 1


if __name__ == "__main__":
    sys.exit(main())
