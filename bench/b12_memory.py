"""B12, the memory of a step: it grows with the tokens of a micro-batch, not with the batch.

Counts the bytes of every tensor that exists between two operations, forward and backward, in addition to
the tensors that existed before (base, adapter, gradients). First the batch grows under one micro-batch
size, then the micro-batch under one batch. Last comes a single group that shares its prompt, under one
micro-batch size; it is divided between samples. The last column times `advanced.micro_batch_tokens` is
the memory that a step needs. On the CPU, in fp32.

    python bench/b12_memory.py --model scratch:qwen3-4m
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schemas.config import RunConfig
from schemas.learner import RULES, GradedGroup, LearnerJob
from schemas.sampling import ModelRef, SampleRecord
from schemas.sampling import Sequence as TokenSequence
from trainer import grpo
from trainer.algorithms.registry import hyperparameters_of
from trainer.forward.decoder import decoder_of
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import build_base
from trainer.native.interface import release_memory
from trainer.policy import LoadedModel, Policy, fresh_policy

PROMPT, SAMPLES = 48, 8


@dataclass
class Living(TorchDispatchMode):
    """Bytes of the tensors that operations made and that still live, and the most there were."""

    peak: int = 0
    held: dict[StorageWeakRef, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id_of(tensor) not in given:
                storage = tensor.untyped_storage()
                self.held[StorageWeakRef(storage)] = storage.nbytes()
        self.held = {ref: size for ref, size in self.held.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.held.values()))
        return result


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def living() -> Iterator[Living]:
    """Count what the operations within leave alive."""
    with Living() as mode:
        yield mode


def make_groups(
    num_groups: int, *, answer: int, vocabulary: int, samples: int = SAMPLES
) -> tuple[GradedGroup, ...]:
    """Groups of `samples` with a shared prompt and answers of one length."""

    def tokens(start: int, length: int) -> tuple[int, ...]:
        return tuple((start + 7 * i) % vocabulary for i in range(length))

    def sample(slot: int, index: int) -> SampleRecord:
        row = TokenSequence(
            tokens=tokens(slot, PROMPT) + tokens(slot + 3 * index, answer),
            loss_mask=(0,) * PROMPT + (1,) * answer,
            logprobs=(0.0,) * PROMPT + (-4.0,) * answer,
        )
        return SampleRecord(index=index, sequences=(row,))

    rewards = tuple(float(i % 2) for i in range(samples))
    return tuple(
        GradedGroup(slot, tuple(sample(slot, i) for i in range(samples)), rewards)
        for slot in range(num_groups)
    )


def policy_of(model: ModelRef) -> tuple[Policy, RunConfig]:
    """A fresh adapter of rank 16 whose gradients exist, as they do in a run."""
    config = RunConfig.model_validate(
        {
            "experiment": {
                "rollout": "r",
                "entrypoint": "main.py",
                "model_path": model.name,
                "dataset": "d",
            },
            "advanced": {"lora_rank": 16},
        }
    )
    base = build_base(model, {}, device=torch.device("cpu"))
    loaded = LoadedModel(base, decoder_of(base), Fallback(base))
    policy = fresh_policy(loaded, LearnerJob("memory", config, model, 1))
    for tensor in policy.tensors.values():
        tensor.requires_grad_().grad = torch.zeros_like(tensor)
    return policy, config


def peak(
    policy: Policy,
    config: RunConfig,
    *,
    num_groups: int,
    answer: int,
    micro_batch_tokens: int,
    samples: int = SAMPLES,
    rules: int = RULES,
) -> tuple[int, int, int]:
    """Peak bytes of a GRPO step, the tokens of its passes together, and of the largest."""
    vocabulary = len(policy.loaded.base.tensors["model.embed_tokens.weight"])
    groups = make_groups(num_groups, answer=answer, vocabulary=vocabulary, samples=samples)
    hyperparameters = hyperparameters_of(config, micro_batch_tokens=micro_batch_tokens, rules=rules)
    release_memory()
    with living() as seen:
        batch = grpo.prepare_batch(
            policy, groups, objective=grpo.OBJECTIVE, hyperparameters=hyperparameters
        )
        _, plan = grpo.accumulate_gradients(policy, batch)
    return seen.peak, sum(plan), max(plan)


def main(model: str, *, answer: int) -> None:
    kind, _, name = model.rpartition(":")
    ref = ModelRef(kind="scratch", name=name) if kind else ModelRef(kind="directory", name=model)
    policy, config = policy_of(ref)
    group = PROMPT + SAMPLES * answer
    print(
        f"{model}, LoRA r16, groups of {SAMPLES} answers of {answer} tokens to {PROMPT} of prompt"
    )
    print(f"{'batch tokens':>14}{'micro-batch tokens':>20}{'peak MiB':>10}{'kB/token':>10}")
    fixed = ((groups, 2 * group) for groups in (2, 4, 8, 16))
    grown = ((16, micro * group) for micro in (1, 2, 4, 8))
    for num_groups, micro in chain(fixed, grown):
        _print(peak(policy, config, num_groups=num_groups, answer=answer, micro_batch_tokens=micro))
    for rules in (RULES, 1):
        print(f"one group of 8 ... 64 answers, by rules {rules}")
        for samples in (8, 16, 32, 64):
            sizes = {"answer": answer, "micro_batch_tokens": group, "samples": samples}
            _print(peak(policy, config, num_groups=1, rules=rules, **sizes))


def _print(found: tuple[int, int, int]) -> None:
    most, batch, largest = found
    print(f"{batch:14}{largest:20}{most / 2**20:10.1f}{most / largest / 1e3:10.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="scratch:qwen3-4m", help="scratch:NAME or a directory")
    parser.add_argument("--answer", type=int, default=64)
    given = vars(parser.parse_args())
    main(given.pop("model"), **given)
