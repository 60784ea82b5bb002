"""B9 and B10: the learner's and the sampler's speed on one CUDA GPU, on random weights.

    python -m bench.gpu            # on a GPU; --only b9 or b10 for one of them
    python -m bench.gpu --tiny     # the same code on a CPU, in shapes of a few thousand parameters

Needs torch, transformers, peft and pydantic, and no platform, database, bus or vLLM (a guard in this
file refuses to import one). Without a GPU it only runs with --tiny. Its figures then show that the code
runs, and nothing about speed.

B9, a learner's step: LoRA r16 on all linear layers over a bfloat16 base with fp32 masters, layers
recomputed, rows of 16,384 tokens, one row a micro-batch, forward and backward pass and optimizer. MFU
counts, per token, 6 x parameters without embeddings and 6 x layers x heads x head size x tokens of a
row (causal attention), over the GPU's dense bfloat16 peak. That is the formula published for full
fine-tuning, so that rows can be compared. It favours LoRA: weights without gradients save up to a third.

B10, sampling: 256 answers to one-token-apart prompts, prompt and answer 512 tokens together, bfloat16,
temperature 1, no end token, compared with Transformers' `generate`. The roofline is the speed at which
the GPU's bandwidth can read all weights and the cache once per step.
"""

import argparse
import os
import sys
from types import ModuleType

FORBIDDEN = ("asyncpg", "aiokafka", "infra", "consumers", "producers")


class Guard:
    """Refuses to import the platform."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"bench/gpu.py must run without {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--only", choices=("b9", "b10"))
    parser.add_argument("--fuse", action="store_true", help="B9 with advanced.compile")
    asked = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.meta_path.insert(0, Guard())
    from bench.gpu_tables import tables

    tables(small=asked.tiny, only=asked.only, fuse=asked.fuse)


if __name__ == "__main__":
    main()
