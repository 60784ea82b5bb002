"""Real vLLM on the CPU: a server of the tiny model, started from an environment of its own.

`HEADRACE_TEST_VLLM` names that environment's Python. Without it, `.vllm` (`make vllm`) is used if it
exists. With neither, the tests are skipped, but in CI they fail.
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from trainer.model.base import Base

ROOT = Path(__file__).resolve().parents[2]
UP_WITHIN_S = 1200
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
"""With it, weights can be replaced."""

FLAGS = (
    *("--dtype", "float32"),
    "--enforce-eager",
    *("--logprobs-mode", "processed_logprobs"),
)
ADAPTERS = ("--enable-lora", *("--max-loras", "4"), *("--max-lora-rank", "16"))


@dataclass
class RealVllm:
    """A server that answers at `url`."""

    url: str
    process: "subprocess.Popen[bytes]"

    def kill(self) -> None:
        """Kill the server and its engine, which is another process, as a failure of the machine
        would."""
        os.killpg(self.process.pid, 9)
        self.process.wait()


def python() -> Path:
    """The Python that has vLLM. Skips the test when there is none; fails it in CI."""
    found = Path(os.environ.get("HEADRACE_TEST_VLLM") or ROOT / ".vllm" / "bin" / "python")
    if found.exists():
        return found.absolute()
    text = f"no vLLM at {found}: run `make vllm`, or name its Python in HEADRACE_TEST_VLLM"
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    pytest.skip(text)


@contextmanager
def real_vllm(
    base: Base,
    folder: Path,
    *,
    max_model_len: int = 128,
    port: int | None = None,
    dev_mode: bool = False,
    has_adapters: bool = True,
) -> Iterator[RealVllm]:
    """A server of this model, which is written to `folder`, until the block ends. Without a `port` it
    has a free one."""
    base.model.save_pretrained(folder / "model")
    base.tokenizer.save_pretrained(folder / "model")
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
    place = ("--model", str(folder / "model"), "--host", "127.0.0.1", "--port", str(port))
    log = folder / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            (
                *(str(python()), "-m", "vllm.entrypoints.openai.api_server"),
                *place,
                *FLAGS,
                *(ADAPTERS if has_adapters else ()),
                *("--max-model-len", str(max_model_len)),
            ),
            env={**os.environ, **ENVIRONMENT, **(DEV_MODE if dev_mode else {}), "PYTHONPATH": ""},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = RealVllm(f"http://127.0.0.1:{port}", process)
    try:
        _wait(server, log)
        yield server
    finally:
        if process.poll() is None:
            server.kill()


def _wait(server: RealVllm, log: Path) -> None:
    until = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < until:
        if server.process.poll() is not None:
            break
        try:
            if httpx.get(f"{server.url}/health", timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail("vLLM did not start:\n" + log.read_text(errors="replace")[-4000:])
