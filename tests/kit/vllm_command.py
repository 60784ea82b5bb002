"""The fake vLLM server as a process that takes vLLM's own arguments: what `headrace up` starts.

    python -P -m tests.kit.vllm_command --notes FILE --model scratch --port 8421 ...

Writes to `--notes` what it was started with, and `vllm` when it is told to stop.
"""

import argparse
import asyncio
import json
import os
import signal
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from schemas.models.scratch import scratch_shape
from schemas.sampling import ModelRef
from tests.kit.vllm import FakeVllm


class LazyFallback:
    """The model of a scratch shape or a directory, which is built when it is first used. That imports
    torch."""

    def __init__(self, name: str, seed: int) -> None:
        is_directory = Path(name).is_dir()
        self._model = ModelRef(
            kind="directory" if is_directory else "scratch",
            name=name if is_directory else scratch_shape(name).name,
            seed=seed,
        )

    @cached_property
    def _built(self) -> Any:
        import torch

        from trainer.forward.transformers_pass import Fallback
        from trainer.model.base import build_base

        return Fallback(build_base(self._model, {}, device=torch.device("cpu")))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._built, name)


async def serve(asked: argparse.Namespace) -> None:
    fallback = cast("Any", LazyFallback(asked.model, asked.seed))
    server = FakeVllm(
        fallback,
        max_model_len=asked.max_model_len,
        max_lora_rank=asked.max_lora_rank,
        dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
    )
    server.url = f"http://{asked.host}:{asked.port}"
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await server.start()
    await stop.wait()
    with asked.notes.with_name("order").open("a") as order:
        order.write("vllm\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gpu-memory-utilization", type=float, required=True)
    parser.add_argument("--enable-lora", action="store_true", required=True)
    parser.add_argument("--max-loras", type=int, required=True)
    parser.add_argument("--max-lora-rank", type=int, required=True)
    parser.add_argument("--logprobs-mode", choices=["processed_logprobs"], required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    told = {name: str(value) for name, value in vars(asked).items()}
    told |= {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    asked.notes.write_text(json.dumps(told))
    asyncio.run(serve(asked))


if __name__ == "__main__":
    main()
