"""B18, the hash of a version: what a step spends on hashing and serialising the version that it made.

Calls the learner's own function on weights and moments in the shapes of Qwen3-0.6B, with fewer layers
and a smaller vocabulary. Under rules 6 the hash is that of two files, which each step makes. Under
rules 7 it is a Merkle root over the tensors, and a file is made only for what is stored. "Peak" is the
memory in addition to the tensors. On the CPU, in fp32.

    python bench/b18_version_hash.py --layers 7     # a quarter of the model, 1.8 GB
"""

import argparse
import time
from pathlib import Path

import torch

from schemas.config import RunConfig
from schemas.learner import LearnerJob
from schemas.sampling import ModelRef
from trainer.learner import Exports, LoadedVersion, _export
from trainer.model.lora_names import Scaling
from trainer.optimizer import FIRST, SECOND, STEP, Optimizer, Optimizers
from trainer.policy import Policy

HIDDEN, LAYERS, VOCABULARY = 1024, 28, 151_936
SHAPES = {
    "self_attn.q_proj": (2048, HIDDEN),
    "self_attn.k_proj": (1024, HIDDEN),
    "self_attn.v_proj": (1024, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 2048),
    "mlp.gate_proj": (3072, HIDDEN),
    "mlp.up_proj": (3072, HIDDEN),
    "mlp.down_proj": (HIDDEN, 3072),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
CASES = (
    ("rules 6, whatever is stored", 6, Exports(weights=False, state=False)),
    ("rules 7, nothing stored", 7, Exports(weights=False, state=False)),
    ("rules 7, weights stored", 7, Exports(weights=True, state=False)),
    ("rules 7, all stored", 7, Exports()),
)


def job_of(rules: int) -> LearnerJob:
    experiment = {"rollout": "r", "entrypoint": "m", "model_path": "scratch:a", "dataset": "d"}
    config = RunConfig.model_validate({"experiment": experiment})
    return LearnerJob("hash", config, ModelRef(kind="scratch", name="a"), 1, rules=rules)


def version_of(layers: int) -> LoadedVersion:
    """A version of random numbers after one step."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (VOCABULARY * layers // LAYERS, HIDDEN)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{n}.weight": shape for n, shape in SHAPES.items()}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    optimizer = Optimizer.fresh(tensors, job_of(6))
    state = {STEP: torch.tensor(1)}
    for name, shape in shapes.items():
        state[f"{STEP}.{name}"] = torch.tensor(1.0)
        state |= {part + name: torch.randn(shape, generator=generator) for part in (FIRST, SECOND)}
    optimizer.load(state)
    return LoadedVersion(Policy(None, tensors, Scaling(1.0)), Optimizers(optimizer))


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def main(layers: int, repeats: int, threads: int) -> None:
    torch.set_num_threads(threads)
    version = version_of(layers)
    held = 3 * sum(tensor.nbytes for tensor in version.policy.tensors.values())
    print(f"{held / 1e9:.2f} GB of weights and moments, {threads} threads, best of {repeats}")
    print(f"{'':30}{'s':>8}{'CPU s':>8}{'GB/s':>8}{'peak MB':>10}")
    for name, rules, exports in CASES:
        found = []
        for _ in range(repeats):
            Path("/proc/self/clear_refs").write_text("5")
            before, wall, cpu = peak_bytes(), time.perf_counter(), time.process_time()
            _export(version, job_of(rules), exports)
            used = (time.perf_counter() - wall, time.process_time() - cpu)
            found.append((*used, (peak_bytes() - before) / 1e6))
        wall, cpu, memory = (min(values) for values in zip(*found, strict=True))
        print(f"{name:30}{wall:8.2f}{cpu:8.2f}{held / wall / 1e9:8.2f}{memory:10.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = vars(parser.parse_args())
    main(**given)
