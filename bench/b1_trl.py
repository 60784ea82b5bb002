"""B1, a GRPO step of the whole platform compared with TRL's GRPOTrainer.

4 prompts x 8 samples, 3.7M parameters (a Qwen3 shape; with --wide, B1w, 130M), LoRA r16 on all linear
layers, fp32, and the same weights, prompts, lengths, reward, loss and optimizer. Our side is `headrace
up` with everything that it starts: Postgres, control process, device worker, confined user code. A step
is the time from one StepSettled to the next in the log. TRL's side (from `make oracles`) is one process
without logging, saving or checkpointing. The two sides alternate.
"""

import argparse
import copy
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import Qwen3ForCausalLM

from schemas.sampling import ModelRef
from tests.kit.platform import GRADER_ONLY, Platform, make_workspace, platform
from trainer.model.base import build_base

GROUPS, SAMPLES = 4, 8
PROMPTS = [f"What is {n} + {n + 3}? Think, then say the number." for n in range(10, 42)]
FILES = {
    "rollouts/graded/main.py": GRADER_ONLY,
    "rollouts/graded/pyproject.toml": '[project]\nname = "graded"\nversion = "0"\n',
}
NAMES = {
    "trl": "TRL GRPOTrainer",
    "graded": "Headrace, built-in turn, user's grader",
    "say": "Headrace, user's workflow and grader",
}
WIDE = {
    "hidden_size": 896,
    "intermediate_size": 2432,
    "num_hidden_layers": 12,
    "layer_types": ["full_attention"] * 12,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
}
PARTS = ("generate", "grade", "wait", "learn", "publish")


@dataclass
class Side:
    """The measurements of one side: seconds of each step, and the rest per block."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    pss_mib: list[float] = field(default_factory=list)
    length: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, found: Mapping[str, Any]) -> None:
        self.seconds += found["seconds"]
        for name in ("cpu", "pss_mib", "length"):
            getattr(self, name).append(found[name])
        for name, value in found["parts"].items():
            self.parts.setdefault(name, []).append(value)


def measure_trl(model: Path, *, tokens: int, steps: int) -> dict[str, Any]:
    """TRL, in a process of its own. The first step warms up and is left out."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "bench.theirs_trl", str(model)),
        *("--prompts", json.dumps(PROMPTS), "--tokens", str(tokens), "--steps", str(steps + 1)),
    ]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(os.cpu_count())}
    environ.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environ)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_platform(
    up: Platform, model: Path, rollout: str, *, tokens: int, steps: int
) -> dict[str, Any]:
    """A run of the platform. CPU seconds are those of all its processes, from submit to the end. The
    first step starts the user's processes and is left out of the times, not of the CPU seconds."""
    before = cpu_seconds(up)
    run = up.submit(config(model, rollout, tokens=tokens, steps=steps + 1), workspace="w")
    info = up.wait(run, within_s=600, every_s=1.0)
    used = cpu_seconds(up) - before
    assert info["run"]["status"] == "finished", info["run"]
    settled = [e for e in up.events(run) if e["type"] == "rl.step.settled"]
    times = [datetime.fromisoformat(event["time"]) for event in settled]
    series = info["metrics"]

    def values(name: str) -> list[float]:
        return [float(point["value"]) for point in series[name]][1:]

    return {
        "seconds": [(b - a).total_seconds() for a, b in pairwise(times)],
        "cpu": used / (steps + 1),
        "pss_mib": sum(_pss(process) for process in tree(up)) / 2**20,
        "length": statistics.mean(values("rollout/response_lengths")),
        "parts": {part: statistics.median(values(f"time/{part}_s")) for part in PARTS},
    }


def config(model: Path, rollout: str, *, tokens: int, steps: int) -> dict[str, dict[str, object]]:
    return {
        "experiment": {
            "rollout": rollout,
            "entrypoint": "main.py",
            "model_path": str(model),
            "dataset": "bench",
        },
        "training": {
            "lr": 1e-4,
            "n_samples_per_prompt": SAMPLES,
            "rollout_batch_size": GROUPS,
            "max_prompt_length": 128,
            "max_response_length": tokens,
        },
        "checkpoints": {"checkpoint_save_freq": 1_000_000},
        "advanced": {
            "max_steps": steps,
            "seed": 1,
            "lora_rank": 16,
            "lora_alpha": 32.0,
            "adam_beta2": 0.95,
            "grad_clip": 1.0,
        },
    }


def tree(up: Platform) -> list[psutil.Process]:
    """Every process of the platform."""
    supervisor = psutil.Process(up.process.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def cpu_seconds(up: Platform) -> float:
    """CPU seconds of the platform so far, of processes that ended too."""
    total = 0.0
    for process in tree(up):
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += used.user + used.system + used.children_user + used.children_system
    return total


def _pss(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0.0


def save_model(directory: Path, *, wide: bool) -> Path:
    """The weights that both sides start from. A wide model has the tokenizer of the small one, so most
    of its 32,000 tokens have no text."""
    ref = ModelRef(kind="scratch", name="qwen3-4m", seed=1)
    base = build_base(ref, {}, device=torch.device("cpu"))
    model = base.model
    if wide:
        torch.manual_seed(1)
        config = copy.deepcopy(base.model.config)
        config.update(WIDE)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    base.tokenizer.save_pretrained(directory)
    return directory


def measure(up: Platform, model: Path, *, tokens: int, steps: int) -> dict[str, Side]:
    """A B C C B A."""
    sides = {name: Side() for name in NAMES}
    order = list(NAMES)
    for name in [*order, *reversed(order)]:
        found = (
            measure_trl(model, tokens=tokens, steps=steps)
            if name == "trl"
            else measure_platform(up, model, name, tokens=tokens, steps=steps)
        )
        sides[name].add(found)
    return sides


def show(sides: Mapping[str, Side], *, tokens: int, steps: int) -> None:
    base = statistics.median(sides["trl"].seconds)
    base_cpu = statistics.mean(sides["trl"].cpu)
    print(f"\n{tokens} new tokens, {GROUPS} x {SAMPLES} samples, 2 x {steps} steps a side")
    print(
        f"{'side':40}{'s/step':>8}{'faster':>8}{'CPU s/step':>12}{'less CPU':>10}{'MiB':>7}{'tokens':>8}"
    )
    for name, side in sides.items():
        median, cpu = statistics.median(side.seconds), statistics.mean(side.cpu)
        print(
            f"{NAMES[name]:40}{median:8.3f}{base / median:7.2f}x{cpu:12.3f}{base_cpu / cpu:9.2f}x"
            f"{statistics.mean(side.pss_mib):7.0f}{statistics.mean(side.length):8.1f}"
        )
        for part, values in side.parts.items():
            print(f"    {part:36}{statistics.mean(values) * 1e3:8.1f} ms")


def main(*, tokens: list[int], steps: int, wide: bool) -> None:
    if importlib.util.find_spec("trl") is None:
        print("B1 needs TRL to compare with; install it with: make oracles")
        return
    print(
        f"B1{'w' if wide else ''} a GRPO step, everything charged, against TRL 1.16's GRPOTrainer"
    )
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        root.chmod(0o755)
        model = save_model(root / "model", wide=wide)
        workspace = make_workspace(root / "workspace", FILES)
        threads = {"OMP_NUM_THREADS": str(os.cpu_count())}
        with platform(root / "home", environment=threads) as up:
            made = up.post("/workspaces", {"url": str(workspace), "name": "w"})
            assert made.status_code == 201, made.text
            rows = [{"user_prompt": text, "ground_truth": "-"} for text in PROMPTS]
            up.upload("bench", "".join(json.dumps(row) + "\n" for row in rows))
            for rollout in ("graded", "say"):
                measure_platform(up, model, rollout, tokens=8, steps=2)
            for count in tokens:
                show(measure(up, model, tokens=count, steps=steps), tokens=count, steps=steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--wide", action="store_true", help="130M parameters")
    main(**vars(parser.parse_args()))
