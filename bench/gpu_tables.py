"""The tables of `bench/gpu.py`: what is measured, and how. It is imported after the guard is
installed."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from schemas.models.scratch import scratch_shape
from schemas.sampling import DrawKey, SamplingParams
from schemas.sampling import Sequence as Row
from tests.kit.families import family
from trainer.forward.decoder import decoder_of
from trainer.forward.ops import Forward
from trainer.forward.packing import Example, pack
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import Base
from trainer.model.char_tokenizer import character_tokenizer
from trainer.model.chat_template import Chat
from trainer.model.lora import fresh_adapter, target_modules
from trainer.model.lora_names import Scaling
from trainer.policy import LoadedModel, Policy
from trainer.sampler import batcher
from trainer.sampler.batcher import Batcher
from trainer.sampler.completion import Completion, Version
from trainer.sampler.counter_rng import CounterRng
from trainer.sampler.memory_limits import CPU

PUBLISHED = {"Qwen3-0.6B": (13_300.0, 0.109), "Qwen3-4B": (6_200.0, 0.217)}
"""prime-rl's table: tokens/s and MFU on one H100."""
PEAKS = {"H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12), "A100": (312e12, 2.04e12)}
"""Name of a GPU -> dense bfloat16 FLOP/s and bytes/s, from the vendor's data sheets."""
RANK = 16


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    learners: dict[str, PreTrainedConfig]
    row_tokens: int
    rows: int
    sampler: tuple[str, PreTrainedConfig]
    batch: int
    context: int
    prompt: int
    repeats: int


def qwen3(hidden: int, intermediate: int, layers: int, heads: int) -> PreTrainedConfig:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )


def full() -> Scale:
    return Scale(
        learners={
            "Qwen3-0.6B": qwen3(1024, 3072, 28, 16),
            "Qwen3-4B": qwen3(2560, 9728, 36, 32),
        },
        row_tokens=16_384,
        rows=2,
        sampler=(
            "Qwen2.5-0.5B",
            Qwen2Config(
                vocab_size=151_936,
                hidden_size=896,
                intermediate_size=4864,
                num_hidden_layers=24,
                num_attention_heads=14,
                num_key_value_heads=2,
                tie_word_embeddings=True,
                max_position_embeddings=32_768,
            ),
        ),
        batch=256,
        context=512,
        prompt=32,
        repeats=5,
    )


def tiny() -> Scale:
    return Scale(
        learners={"tiny Qwen3": family("qwen3").config()},
        row_tokens=64,
        rows=2,
        sampler=("tiny Qwen2.5", family("qwen2.5").config()),
        batch=6,
        context=24,
        prompt=4,
        repeats=2,
    )


def base_of(config: PreTrainedConfig, device: torch.device) -> Base:
    """Random weights in bfloat16, made on the device itself."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval().requires_grad_(requires_grad=False)
    tokenizer = character_tokenizer(scratch_shape("qwen3-tiny"))
    return Base(model, tokenizer, dict(model.state_dict()), frozenset(), None)


def loaded_of(base: Base) -> LoadedModel:
    decoder = decoder_of(base)
    if decoder is None:
        raise SystemExit(f"the lean decoder does not run {base.model.config.model_type}")
    return LoadedModel(base, decoder, Fallback(base))


def flops_per_token(model: PreTrainedModel, row_tokens: int) -> float:
    """See the top of `bench/gpu.py`."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = model.num_parameters(exclude_embeddings=True)
    attention = config.num_hidden_layers * config.num_attention_heads * head_dim * row_tokens
    return 6.0 * (weights + attention)


class Clock:
    """Seconds on a device: waits for it before and after."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, work: Callable[[], object]) -> float:
        self._wait()
        began = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def learner(
    config: PreTrainedConfig, scale: Scale, device: torch.device, *, fuse: bool
) -> list[str]:
    """One row of B9's table, after its name: tokens/s, FLOP per token, peak memory."""
    base = base_of(config, device)
    loaded = loaded_of(base)
    modules = target_modules(base, "all-linear")
    tensors = fresh_adapter(base, modules, rank=RANK, seed=0)
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    policy = Policy(
        loaded,
        tensors,
        Scaling(2.0 * RANK),
        None,
        Forward(recompute=True, fuse=fuse, fuses_attention=fuse),
    )
    adam = torch.optim.AdamW(leaves, lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(3, 100, (scale.rows, scale.row_tokens), generator=generator).tolist()
    examples = [
        Example(i, Row(tokens=tuple(ids), loss_mask=(1,) * len(ids), logprobs=(0.0,) * len(ids)))
        for i, ids in enumerate(drawn)
    ]

    def step() -> None:
        for micro in pack(examples, micro_batch_tokens=scale.row_tokens, share=True, device=device):
            logprobs_M, _ = policy.logprobs(micro, temperature=1.0)
            (-logprobs_M.mean()).backward()
        adam.step()
        adam.zero_grad(set_to_none=True)

    clock = Clock(device)
    clock.seconds(step)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(clock.seconds(step) for _ in range(scale.repeats))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    rate = scale.rows * scale.row_tokens / seconds
    flops = flops_per_token(base.model, scale.row_tokens)
    return [f"{rate:,.0f}", mfu(rate * flops, device), f"{peak / 2**30:.1f}" if peak else "-"]


def peaks(device: torch.device) -> tuple[float, float] | None:
    """FLOP/s and bytes/s of this GPU, if they are known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((values for known, values in PEAKS.items() if known in name), None)


def mfu(flops_per_s: float, device: torch.device) -> str:
    known = peaks(device)
    return f"{flops_per_s / known[0]:.1%}" if known else "-"


def sampled(loaded: LoadedModel, scale: Scale, seed: int) -> int:
    """Sample a batch through the engine's batcher. Returns the number of tokens that were drawn."""
    base = loaded.base
    chat, edition = (
        Chat(base.tokenizer, base.stop_ids),
        Version("bench", "", loaded, {}, Scaling(1.0)),
    )
    rows = [
        Completion(
            version=edition,
            chat=chat,
            stop_ids=frozenset(),
            params=SamplingParams(),
            prompt_ids=tuple(3 + (i + 7 * j) % 90 for j in range(scale.prompt)),
            max_new_tokens=scale.context - scale.prompt,
            rng=CounterRng(
                DrawKey(purpose="train", step=1, slot=0, replacement=0, sample=i),
                seed=seed,
                prompt=str(i),
                occurrence=0,
            ),
        )
        for i in range(scale.batch)
    ]
    running, arrivals = BATCHERS.setdefault(id(loaded), Batcher()), rows
    while arrivals or running.is_busy:
        running.advance(arrivals, lambda: False)
        arrivals = []
    if not all(len(row.completion_ids) == row.max_new_tokens for row in rows):
        raise SystemExit("a row ended early: the figures would not be comparable")
    return sum(len(row.completion_ids) for row in rows)


BATCHERS: dict[int, Batcher] = {}
"""Engines outlive a batch, and with them recorded graphs and cleared caches."""


@torch.inference_mode()
def generated(loaded: LoadedModel, scale: Scale) -> int:
    """The same by Transformers' generate."""
    model, device = loaded.base.model, loaded.base.model.device
    prompts = torch.tensor(
        [[3 + (i + 7 * j) % 90 for j in range(scale.prompt)] for i in range(scale.batch)]
    )
    new = scale.context - scale.prompt
    out = model.generate(
        prompts.to(device),
        attention_mask=torch.ones_like(prompts).to(device),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
    )
    return int(out[:, scale.prompt :].numel())


def roofline(base: Base, scale: Scale, device: torch.device) -> float | None:
    """Tokens/s if a step only read all weights and, on average, half of the answers' cache."""
    known = peaks(device)
    if known is None:
        return None
    config = base.model.config
    head_dim = config.hidden_size // config.num_attention_heads
    entry = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    cache = scale.batch * entry * (scale.prompt + scale.context) / 2
    return scale.batch * known[1] / (base.num_bytes + cache)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n{title}\n")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def b9(scale: Scale, device: torch.device, *, fuse: bool) -> None:
    rows = []
    for name, config in scale.learners.items():
        tokens, utilised, memory = learner(config, scale, device, fuse=fuse)
        rate, share = PUBLISHED.get(name, (0.0, 0.0))
        theirs = [f"{rate:,.0f}", f"{share:.1%}"] if rate else ["-", "-"]
        rows.append([name, tokens, utilised, memory, *theirs])
        if device.type == "cuda":
            torch.cuda.empty_cache()
    head = ("model", "tok/s", "MFU", "peak GiB", "prime-rl tok/s", "prime-rl MFU")
    title = f"B9 learner: LoRA r{RANK}, rows of {scale.row_tokens:,} tokens, layers recomputed"
    table(title, head, rows)


def b10(scale: Scale, device: torch.device) -> None:
    name, config = scale.sampler
    loaded = loaded_of(base_of(config, device))
    loaded.base.model.generation_config.eos_token_id = None
    clock = Clock(device)
    num, theirs_num = sampled(loaded, scale, 0), generated(loaded, scale)
    ours: list[float] = []
    theirs: list[float] = []
    for i in range(scale.repeats):
        # A B B A: what drifts on a machine meets both alike.
        sides = [
            (ours, lambda i=i: sampled(loaded, scale, 1 + i), num),
            (theirs, lambda: generated(loaded, scale), theirs_num),
        ]
        for rates, work, tokens in sides if i % 2 == 0 else sides[::-1]:
            rates.append(tokens / clock.seconds(work))
    mine, other, line = (
        statistics.median(ours),
        statistics.median(theirs),
        roofline(loaded.base, scale, device),
    )
    rows = [
        ["Headrace", f"{mine:,.0f}", f"{mine / other:.2f}", f"{mine / line:.1%}" if line else "-"],
        ["Transformers generate", f"{other:,.0f}", "1", f"{other / line:.1%}" if line else "-"],
    ]
    title = f"B10 sampling: {name} shape, batch {scale.batch}, context {scale.context}, bfloat16"
    table(title, ("engine", "tok/s", "ratio", "of the roofline"), rows)


def tables(*, small: bool, only: str | None, fuse: bool) -> None:
    """Print B9 and B10, or `only` one of them. Raises SystemExit without a GPU, unless `small`."""
    if not small and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA GPU here; --tiny runs the same code on the CPU")
    device = torch.device("cpu" if small else "cuda")
    scale = tiny() if small else full()
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    print(
        f"{kind or device.type}; load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}"
    )
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft")))
    if small:
        print("tiny shapes on the CPU: this shows that the code runs, not how fast it is")
        limits = replace(CPU, most_rows=scale.batch, uses_graphs=True)
        # Here batcher finds it, and this is what a GPU runs, but for the replay.
        vars(batcher)["memory_limits_of"] = lambda device: limits
    torch.use_deterministic_algorithms(mode=True)
    if only != "b10":
        b9(scale, device, fuse=fuse)
    if only != "b9":
        b10(scale, device)
