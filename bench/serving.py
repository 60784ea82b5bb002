"""Deployments under load, with the unmodified `openai` package against a whole platform.

`python -m bench.serving [REQUESTS]` trains a LoRA adapter of 2 MB on `scratch:qwen3-4m` (`--large`: on a
model of 43 million parameters), deploys it, and prints five figures. Everything runs on one machine,
each process with one thread for arithmetic.

- how many of REQUESTS (10,000) fail while the version is swapped again and again (goal: none)
- tokens per second through the deployment, over those of the bare engine (goal: 0.95), and the CPU time
  of 1,000 tokens in the processes involved, which depends less on what else the machine does
- the time to the first token of a stream, less that of the bare engine (goal: 20 ms)
- the time from the request to deploy to the first answer (goal: 1 s)
- the share of a core that serving takes while a run trains (the setting allows 25 %)
"""

import asyncio
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch
import transformers

from infra.operations.local.home import SupervisorState, read_state
from schemas.artifact_refs import ArtifactRef
from schemas.models.scratch import scratch_shape
from schemas.sampling import DrawKey, ModelRef, PolicyRef, SampleRequest, SamplingParams
from tests.kit.platform import Platform, eventually, make_workspace, platform, run_config
from trainer.engine import Engine
from trainer.model.char_tokenizer import character_tokenizer

SMALL, LARGE, SEED = "scratch:qwen3-4m", "bench-43m", 7
RANKS = {SMALL: 22, LARGE: 6}
"""With these, an adapter has 2 MB."""
REQUESTS, CLIENTS, SHORT = 10_000, 32, 4
ANSWERS, IN_FLIGHT, LONG = 128, 16, 192
ROUNDS, STREAMS, DEPLOYS, FLOOD_S = 3, 40, 5, 15
ASKED: Any = [{"role": "user", "content": "Say a long number, and then another one."}]
TEXT = "A long number is 1234567890"
"""The speed is that of plain texts, because this model ends a chat after a few tokens."""


@dataclass(frozen=True)
class Subject:
    """The deployment, and the same weights for the bare engine."""

    running: Platform
    client: openai.AsyncOpenAI
    base: ModelRef
    model: str
    weights: bytes

    def request(self, seed: int, tokens: int) -> SampleRequest:
        """The request to the engine that the deployment makes of the same request of a client."""
        digest = hashlib.sha256(self.weights).hexdigest()
        weights = ArtifactRef(uri="file:///bench", sha256=digest, size=len(self.weights))
        return SampleRequest(
            model=self.base,
            policy=PolicyRef(version=2, weights=weights),
            lora_alpha=32,
            params=SamplingParams(seed=seed, max_new_tokens=tokens, max_prompt_tokens=1 << 20),
            key=DrawKey(purpose="serve", step=0, slot=0, replacement=0, sample=0),
            messages=(),
            prompt=TEXT,
        )


def make_model(directory: Path) -> str:
    """Write a model with random weights, and return its path."""
    torch.manual_seed(SEED)
    tokenizer = character_tokenizer(scratch_shape(SMALL))
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    path = directory / LARGE
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def train(running: Platform, directory: Path, model: str) -> None:
    """Train two steps, with a checkpoint after each."""
    workspace = make_workspace(directory / "workspace")
    running.post("/workspaces", {"url": str(workspace), "name": "w"})
    running.upload("numbers")
    config = run_config(
        experiment={"model_path": model},
        training={"lr": 1e-6},  # so that answers stay as long as those of the base
        checkpoints={"checkpoint_save_freq": 1},
        advanced={
            "max_steps": 2,
            "seed": SEED,
            "lora_rank": RANKS[base_name(model)],
            "deterministic": False,
        },
    )
    running.wait(running.submit(config, workspace="w", name="first"), "finished")


def base_name(model: str) -> str:
    """The name of the base model in the names of its deployments."""
    return model if model == SMALL else LARGE


def deploy(running: Platform, ref: str, name: str) -> str:
    """Deploy a checkpoint, and return the name of the model once it is loaded."""
    running.post("/deployments", {"checkpoint": ref, "name": name})

    def loaded() -> dict[str, Any] | None:
        found: dict[str, Any] = running.get(f"/deployments/{name}")["deployment"]
        return None if found["pending"] else found

    found = eventually(loaded, within_s=60, what=f"{name} is loaded", every_s=0.02)
    assert found["status"] == "active", found
    return str(found["model"])


async def in_flight(
    number: int, most: int, ask: Callable[[int], Awaitable[int]]
) -> tuple[int, float]:
    """Ask `number` times, `most` at a time. Returns the sum of the answers, and the seconds."""
    waiting = iter(range(number))
    total = 0

    async def work() -> None:
        nonlocal total
        for each in waiting:
            answered = await ask(each)
            total += answered

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(most)))
    return total, time.perf_counter() - began


async def swap_under_load(subject: Subject, requests: int) -> None:
    """Ask while the version is swapped, and print how many requests failed."""
    failures: list[Exception] = []
    swaps = 0

    async def ask(number: int) -> int:
        try:
            answer = await subject.client.chat.completions.create(
                model=subject.model, messages=ASKED, max_tokens=SHORT
            )
            return answer.usage.completion_tokens if answer.usage else 0
        except Exception as error:  # every failure counts
            failures.append(error)
            return 0

    async def swap() -> None:
        nonlocal swaps
        while True:
            ref = f"first@{1 + swaps % 2}"
            await asyncio.to_thread(deploy, subject.running, ref, "bench")
            swaps += 1
            await asyncio.sleep(0.5)

    swapping = asyncio.ensure_future(swap())
    _, seconds = await in_flight(requests, CLIENTS, ask)
    swapping.cancel()
    await asyncio.gather(swapping, return_exceptions=True)
    print(
        f"requests {requests}, failed {len(failures)}, swaps {swaps}, "
        f"{requests / seconds:.0f} requests/s"
    )
    for error in failures[:3]:
        print(f"  {error!r}")


async def compare_speed(subject: Subject, engine: Engine) -> None:
    """Print the tokens per second of both, and the time to the first token."""
    pids = {child.name: child.pid or 0 for child in _state(subject.running).children}
    spent = {"engine": 0.0, "serving": 0.0, "control": 0.0}
    through, bare, total = [], [], 0
    for _ in range(ROUNDS):
        before = time.process_time()
        tokens, seconds = await in_flight(
            ANSWERS, IN_FLIGHT, lambda each: _sample(subject, engine, each)
        )
        spent["engine"] += time.process_time() - before
        bare.append(tokens / seconds)
        total += tokens
        before_each = {name: cpu_s(pids[name]) for name in ("serving", "control")}
        tokens, seconds = await in_flight(ANSWERS, IN_FLIGHT, lambda each: _ask(subject, each))
        through.append(tokens / seconds)
        for name, used in before_each.items():
            spent[name] += cpu_s(pids[name]) - used
    ratio = statistics.median(t / b for t, b in zip(through, bare, strict=True))
    print(
        f"tokens/s: engine {statistics.median(bare):.0f}, deployment "
        f"{statistics.median(through):.0f}, ratio {ratio:.3f}"
    )
    print(f"{total / ROUNDS / ANSWERS:.0f} tokens in an answer, {IN_FLIGHT} requests in flight")
    each = ", ".join(f"{name} {1e6 * used / total:.0f}" for name, used in spent.items())
    print(f"ms of CPU time for 1,000 tokens: {each}")
    told = [await _first_token(subject, engine, each) for each in range(STREAMS)]
    streamed = [await _first_chunk(subject, each) for each in range(STREAMS)]
    over = statistics.median(streamed) - statistics.median(told)
    print(
        f"first token: engine {1000 * statistics.median(told):.1f} ms, deployment "
        f"{1000 * statistics.median(streamed):.1f} ms, {1000 * over:.1f} ms over it"
    )


def _state(running: Platform) -> SupervisorState:
    state = read_state(running.home)
    assert state is not None
    return state


def cpu_s(pid: int) -> float:
    """The seconds of CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _sample(subject: Subject, engine: Engine, seed: int) -> int:
    turn = await engine.sampler.sample(subject.request(seed, LONG))
    return len(turn.completion_ids)


async def _ask(subject: Subject, seed: int) -> int:
    answer = await subject.client.completions.create(
        model=subject.model, prompt=TEXT, max_tokens=LONG, seed=seed
    )
    return answer.usage.completion_tokens if answer.usage else 0


async def _first_token(subject: Subject, engine: Engine, seed: int) -> float:
    began = time.perf_counter()
    told: list[float] = []
    await engine.sampler.stream(
        subject.request(seed, 8), lambda _: told.append(time.perf_counter())
    )
    return (told[0] if told else time.perf_counter()) - began


async def _first_chunk(subject: Subject, seed: int) -> float:
    began = time.perf_counter()
    stream = await subject.client.completions.create(
        model=subject.model, prompt=TEXT, max_tokens=8, seed=seed, stream=True
    )
    first = None
    async for chunk in stream:
        if first is None and chunk.choices and chunk.choices[0].text:
            first = time.perf_counter()
    return (first or time.perf_counter()) - began


async def time_deploys(subject: Subject) -> None:
    """Print how long a deploy takes until its first answer."""
    seconds = []
    for number in range(DEPLOYS):
        name, began = f"new{number}", time.perf_counter()
        body = {"checkpoint": f"first@{1 + number % 2}", "name": name}
        await asyncio.to_thread(subject.running.post, "/deployments", body)
        while True:
            try:
                await subject.client.chat.completions.create(
                    model=subject.model.replace(":bench", f":{name}"), messages=ASKED, max_tokens=1
                )
                break
            except openai.NotFoundError:
                await asyncio.sleep(0.01)
        seconds.append(time.perf_counter() - began)
        await asyncio.to_thread(_undeploy, subject.running, name)
    print(
        f"deploy of {len(subject.weights) / 1e6:.1f} MB to its first answer: median "
        f"{statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"
    )


def _undeploy(running: Platform, name: str) -> None:
    running.api.delete(f"/deployments/{name}")

    def is_gone() -> bool | None:
        status = running.get(f"/deployments/{name}")["deployment"]["status"]
        return status == "inactive" or None

    eventually(is_gone, within_s=30, what=f"{name} is undeployed")


async def share_while_training(subject: Subject, workers: Sequence[str]) -> None:
    """Flood the deployment while a run trains, and print the CPU time of the process that serves."""
    config = run_config(
        experiment={"model_path": SMALL},
        advanced={"max_steps": 10_000, "seed": SEED, "deterministic": False},
    )
    run = await asyncio.to_thread(subject.running.submit, config, workspace="w", name="flooded")
    await asyncio.to_thread(subject.running.wait, run, "running")
    pids = {child.name: child.pid or 0 for child in _state(subject.running).children}
    flooding = asyncio.ensure_future(in_flight(10**6, IN_FLIGHT, lambda each: _ask(subject, each)))
    await asyncio.sleep(3)  # it takes a second until serving knows of the run
    began, before = time.perf_counter(), {name: cpu_s(pids[name]) for name in workers}
    await asyncio.sleep(FLOOD_S)
    seconds = time.perf_counter() - began
    used = {name: (cpu_s(pids[name]) - before[name]) / seconds for name in workers}
    flooding.cancel()
    await asyncio.gather(flooding, return_exceptions=True)
    await asyncio.to_thread(subject.running.post, f"/runs/{run}/stop", {})
    shown = ", ".join(f"{name} {100 * share:.0f} %" for name, share in used.items())
    print(f"share of a core while a run trains and {IN_FLIGHT} requests wait: {shown}")


async def measure(running: Platform, base: ModelRef, requests: int) -> None:
    """Print all figures."""
    model = await asyncio.to_thread(deploy, running, "first@2", "bench")
    path = "/checkpoints/first@2/files/adapter_model.safetensors"
    weights = (await asyncio.to_thread(running.api.get, path)).content
    api_key = (running.home / "token").read_text().strip()
    engine = Engine(fetch=lambda ref: weights, threads=1)
    async with openai.AsyncOpenAI(
        base_url=f"{running.url}/v1", api_key=api_key, max_retries=0, timeout=300
    ) as client:
        subject = Subject(running, client, base, model, weights)
        await compare_speed(subject, engine)
        await time_deploys(subject)
        await swap_under_load(subject, requests)
        await share_while_training(subject, ("serving", "worker"))
    await engine.aclose()


def main() -> None:
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    with tempfile.TemporaryDirectory() as directory, platform(Path(directory) / "home") as running:
        model, base = SMALL, ModelRef(kind="scratch", name="qwen3-4m", seed=SEED)
        if "--large" in sys.argv:
            model = make_model(Path(directory))
            base = ModelRef(kind="directory", name=model)
        train(running, Path(directory), model)
        asyncio.run(measure(running, base, numbers[0] if numbers else REQUESTS))


if __name__ == "__main__":
    main()
