"""The vLLM server that `headrace up` starts on the learner's GPU: its settings and its command.

Both share the GPU's memory by a fixed split, because if one of them grew the other would fail. vLLM
takes its percentage when it starts. The device workers may use the rest, except for a reserve.
"""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for --max-lora-rank."""
RESERVE = 0.05
"""The part of the GPU's memory for contexts and for what allocators cannot return."""
COMMAND = "-m vllm.entrypoints.openai.api_server"

Tuning = Literal["lora", "full"]
"""The versions that vLLM servers sample: adapters only, or all weights of a run too."""


class BadValue(ValueError):
    """A variable holds a value that it may not hold. `args` are (name, value, what it may hold)."""


@dataclass(frozen=True, slots=True)
class VllmLaunch:
    """The vLLM server to start. It gets `gpu_percent` of the GPU's memory. With `tuning` "full" all its
    weights can be replaced while it runs."""

    command: tuple[str, ...]
    model: str
    port: int
    gpu_percent: int
    max_lora_rank: int
    max_loras: int
    arguments: tuple[str, ...]
    tuning: Tuning = "lora"
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> "VllmLaunch":
        """Read the environment. Raises BadValue."""
        model = environ.get("HEADRACE_VLLM_MODEL") or ""
        if not model:
            may = (
                "the model to serve, a directory or a hub id: HEADRACE_SAMPLER=vllm starts a server"
            )
            raise BadValue("HEADRACE_VLLM_MODEL", model, may)
        rank = read_number(environ, "HEADRACE_VLLM_MAX_LORA_RANK", 16, 1, 512)
        if rank not in RANKS:
            may = "one of " + ", ".join(map(str, RANKS))
            raise BadValue("HEADRACE_VLLM_MAX_LORA_RANK", str(rank), may)
        return cls(
            command=_words(environ, "HEADRACE_VLLM_COMMAND") or (sys.executable, *COMMAND.split()),
            model=model,
            port=read_number(environ, "HEADRACE_VLLM_PORT", 8421, 1, 65_535),
            gpu_percent=read_number(environ, "HEADRACE_VLLM_GPU_PERCENT", 45, 5, 90),
            max_lora_rank=rank,
            max_loras=read_number(environ, "HEADRACE_VLLM_MAX_LORAS", 6, 2, 64),
            arguments=_words(environ, "HEADRACE_VLLM_ARGUMENTS"),
            tuning=read_tuning(environ),
            api_key=environ.get("HEADRACE_VLLM_API_KEY") or None,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def max_num_seqs(self) -> int | None:
        """How many sequences it computes at once, from its arguments; None for vLLM's default. The
        last one counts, as it does for vLLM."""
        found = None
        for word, following in pairwise((*self.arguments, "")):
            name, _, value = word.partition("=")
            if name in ("--max-num-seqs", "--max_num_seqs"):
                value = value or following
                found = int(value) if value.isascii() and value.isdigit() else found
        return found

    @property
    def argv(self) -> tuple[str, ...]:
        return (
            *self.command,
            *("--model", self.model),
            *("--host", "127.0.0.1"),
            *("--port", str(self.port)),
            *("--gpu-memory-utilization", f"{self.gpu_percent / 100:.2f}"),
            "--enable-lora",
            *("--max-loras", str(self.max_loras)),
            *("--max-lora-rank", str(self.max_lora_rank)),
            *("--logprobs-mode", "processed_logprobs"),
            *self.arguments,
        )

    def env_vars(self, shared: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of the server: those of all children, and vLLM's own."""
        key = {"VLLM_API_KEY": self.api_key} if self.api_key else {}
        full = {"VLLM_SERVER_DEV_MODE": "1"} if self.tuning == "full" else {}
        return {**shared, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", **full, **key}

    def learner_share(self, num_engines: int) -> float:
        """Return the fraction of the GPU's memory that each of `num_engines` processes may use."""
        return (1 - self.gpu_percent / 100 - RESERVE) / num_engines


def read_tuning(environ: Mapping[str, str]) -> Tuning:
    """Return what the vLLM servers sample. Raises BadValue."""
    tuning = environ.get("HEADRACE_VLLM_TUNING") or "lora"
    if tuning not in ("lora", "full"):
        raise BadValue("HEADRACE_VLLM_TUNING", tuning, "lora or full")
    return "full" if tuning == "full" else "lora"


def read_number(environ: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """Return the whole number of a variable, or its default. Raises BadValue."""
    value = environ.get(name)
    if not value:
        return default
    if not value.isascii() or not value.isdigit() or not least <= int(value[:9]) <= most:
        raise BadValue(name, value, f"a whole number from {least} to {most}")
    return int(value)


def _words(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    value = environ.get(name) or ""
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise BadValue(name, value, f"words as a shell reads them ({error})") from error
