# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""A server that speaks the part of vLLM's HTTP that Headrace uses, over Transformers and peft. They are
imported once something is sampled or loaded, so a process that only says what it serves starts soon.

`make test-vllm` runs the same tests against real vLLM, so that this one does not lie. It can do what a
test cannot make a real one do: break off, come back, sample from something else than it was given.
"""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from schemas.sampling import LoraScaling

if TYPE_CHECKING:
    import torch

    from trainer.forward.transformers_pass import Fallback
    from trainer.model.base import Base
    from trainer.model.lora_names import Scaling

BASE = "base"
ROOT = "/model"
SAMPLING = threading.Lock()
"""Sampling runs in threads beside the event loop. The lock admits one at a time, because all fakes share
one Transformers module."""


@dataclass
class FakeVllm:
    """`fallback` holds what it serves. The switches: `raw`: logprobs without the temperature; `deaf`: it
    says that it loaded an adapter or weights, and goes on with what it has; `hold`: completions wait for
    this; `breaks_after`: the next stream breaks off after so many tokens; `masks`: how it follows a
    grammar: as vLLM does, not at all, without the tokens `forbids`, or as a server of another backend.
    `lies_every`: one in so many answers of an adapter comes from the base model; `lies` counts them.
    `rounds`: logprobs have 4 decimals, so they do not depend on how tensors are aligned in memory.
    With `dev_mode` its weights can be replaced; `reloads` are the paths of those that it was given."""

    fallback: "Fallback"
    max_model_len: int = 128
    max_lora_rank: int = 16
    raw: bool = False
    deaf: bool = False
    hold: asyncio.Event | None = None
    breaks_after: int | None = None
    masks: Literal["vllm", "none", "narrow", "refused"] = "vllm"
    forbids: int | None = None
    lies_every: int | None = None
    rounds: bool = False
    lies: int = 0
    drawn: int = 0
    dev_mode: bool = False
    label: str = "default"
    reloads: list[str] = field(default_factory=list)
    weights: "dict[str, torch.Tensor]" = field(default_factory=dict)
    prefixes: "dict[tuple[object, ...], torch.Tensor]" = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    url: str = ""
    server: uvicorn.Server | None = None
    task: "asyncio.Task[None] | None" = None
    tensors: "dict[str, dict[str, torch.Tensor]]" = field(default_factory=dict)
    scalings: "dict[str, Scaling]" = field(default_factory=dict)

    @property
    def base(self) -> "Base":
        return self.fallback.base

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
                *(self.dev_routes() if self.dev_mode else ()),
            ]
        )

    def dev_routes(self) -> list[Route]:
        return [
            Route("/weight_info", self.weight_info),
            Route("/update_weight_version", self.update_weight_version, methods=["POST"]),
            Route("/collective_rpc", self.collective_rpc, methods=["POST"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
        ]

    async def start(self) -> None:
        """Start to serve, at the same address as before if it was started before."""
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        listening = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(self.app(), lifespan="off", log_level="warning")
        self.server = uvicorn.Server(config)
        self.task = asyncio.create_task(self.server.serve([listening]))
        while not self.server.started:
            await asyncio.sleep(0.005)

    async def die(self) -> None:
        """End as by kill -9: connections break, and loaded adapters are lost."""
        assert self.server is not None
        assert self.task is not None
        for server in self.server.servers:
            server.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()
        self.adapters.clear()
        self.weights, self.label = {}, "default"
        self.prefixes.clear()
        self.server.should_exit = self.server.force_exit = True
        await self.task

    async def health(self, request: Request) -> Response:
        return Response()

    async def models(self, request: Request) -> Response:
        base = {"id": BASE, "max_model_len": self.max_model_len, "parent": None, "root": ROOT}
        adapters = [
            {"id": name, "root": path, "parent": BASE, "max_model_len": None}
            for name, path in self.adapters.items()
        ]
        return JSONResponse({"object": "list", "data": [base, *adapters]})

    async def load(self, request: Request) -> Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        if config["r"] > self.max_lora_rank:
            text = f"LoRA rank {config['r']} is greater than max_lora_rank {self.max_lora_rank}."
            return _error(500, text)
        from safetensors.torch import load_file

        from trainer.model.lora_names import Scaling

        self.tensors[name] = load_file(Path(path) / "adapter_model.safetensors")
        kind: LoraScaling = "rank_stabilized" if config["use_rslora"] else "standard"
        self.scalings[name] = Scaling(config["lora_alpha"], kind)
        self.adapters[name] = path
        self.loads.append(name)
        self.prefixes = {key: value for key, value in self.prefixes.items() if key[0] != name}
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.label})

    async def update_weight_version(self, request: Request) -> Response:
        self.label = (await request.json())["new_version"]
        return JSONResponse({"success": True, "new_version": self.label})

    async def collective_rpc(self, request: Request) -> Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        path = body["kwargs"]["weights_path"]
        self.reloads.append(path)
        if not self.deaf:
            from safetensors.torch import load_file

            file = Path(path) / "model.safetensors"
            if path != ROOT and not file.is_file():
                return _error(500, f"Cannot find any model weights with `{path}`")
            self.weights = {} if path == ROOT else load_file(file)
        return JSONResponse({"results": [None]})

    async def reset_prefix_cache(self, request: Request) -> Response:
        self.prefixes.clear()
        return JSONResponse({"success": True})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        if body["model"] not in (BASE, *self.adapters):
            return _error(404, f"The model `{body['model']}` does not exist.")
        if len(body["prompt"]) + body["max_tokens"] > self.max_model_len:
            return _error(
                400, f"This model's maximum context length is {self.max_model_len} tokens."
            )
        if not all(0 <= token < self.base.model.config.vocab_size for token in body["prompt"]):
            return _error(400, "Token id is out of vocabulary")
        if "structured_outputs" in body and self.masks == "refused":
            return _error(400, "Invalid grammar specification.")
        self.asked.append(body)
        if self.hold is not None:
            await self.hold.wait()
        sampled, finish, text = await asyncio.to_thread(self.sample, body)
        ids = [one.token for one in sampled]
        logprobs = _logprobs(sampled, body)
        if self.rounds:
            logprobs["token_logprobs"] = [round(one, 4) for one in logprobs["token_logprobs"]]
        if body["stream"]:
            lines = self.lines(sampled, finish, body)
            return StreamingResponse(lines, media_type="text/event-stream")
        choice = {
            "index": 0,
            "text": text,
            "finish_reason": finish,
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": logprobs,
        }
        return JSONResponse({"object": "text_completion", "choices": [choice]})

    async def lines(
        self, sampled: "list[Drawn]", finish: str, body: dict[str, Any]
    ) -> AsyncIterator[str]:
        """The events of a stream: one token each, as far as `breaks_after` lets it come."""
        for number, one in enumerate(sampled):
            if number == self.breaks_after:
                self.breaks_after = None
                await self.die()
            choice = {
                "index": 0,
                "text": self.text([one.token]),
                "finish_reason": finish if number == len(sampled) - 1 else None,
                "token_ids": [one.token],
                "logprobs": _logprobs([one], body),
            }
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    def sample(self, body: dict[str, Any]) -> "tuple[list[Drawn], str, str]":
        """A completion: its tokens, finish reason and text."""
        import torch

        with SAMPLING, torch.no_grad():
            sampled, finish = self.draw(body)
            return sampled, finish, self.text([one.token for one in sampled])

    def draw(self, body: dict[str, Any]) -> "tuple[list[Drawn], str]":
        """Token by token through Transformers and peft; the draws are of the seed alone."""
        import numpy as np
        import torch

        from trainer.grammar.token_masks import vocabulary_of
        from trainer.model.lora_names import Scaling

        adapter = {} if self.deaf else self.tensors.get(body["model"], {})
        is_lie = self.is_lie(body)
        trained = {} if is_lie else adapter or self.weights
        scaling = self.scalings.get(body["model"], Scaling(1.0))
        draws = np.random.default_rng(body["seed"])
        sampled: list[Drawn] = []
        forced = body.get("structured_outputs") if self.masks != "none" else None
        state = vocabulary_of(self.base, "vllm").start(forced["grammar"]) if forced else None
        cache, read = None, list(body["prompt"])
        prefix = (body["model"], is_lie, *read)
        while len(sampled) < body["max_tokens"]:
            ids_T = torch.tensor(read)
            logits_V, cache = self.fallback.extend(trained, ids_T, cache, scaling=scaling)
            if not sampled:  # as from cached keys and values, whatever weights they are from
                logits_V = self.prefixes.setdefault(prefix, logits_V)
            if state is not None:
                logits_V = self.restrict(logits_V, state.allowed)
            temperature = body["temperature"] or 1.0
            processed_V = _nucleus((logits_V.double() / temperature).log_softmax(-1), body["top_p"])
            draw = draws.random()
            token = int((processed_V.exp().cumsum(-1) <= draw).sum().clamp(max=len(logits_V) - 1))
            if body["temperature"] == 0:
                token = int(logits_V.argmax())
            said_V = logits_V.double().log_softmax(-1) if self.raw else processed_V
            sampled.append(Drawn(token, said_V))
            read = [token]
            text = self.text([one.token for one in sampled])
            if token in body["stop_token_ids"] or any(s in text for s in body["stop"]):
                return sampled, "stop"
            if state is not None:
                state.advance(token)
        return sampled, "length"

    def is_lie(self, body: dict[str, Any]) -> bool:
        """Whether this answer comes from other weights than it was asked for. The canary, which ignores
        the end of an answer, gets the right ones."""
        if self.lies_every is None or body["model"] == BASE or body["ignore_eos"]:
            return False
        self.drawn += 1
        self.lies += (is_lie := self.drawn % self.lies_every == 0)
        return is_lie

    def restrict(self, logits_V: "torch.Tensor", mask: bytes) -> "torch.Tensor":
        """The logits of the allowed tokens, without `forbids` where there are others."""
        import torch

        from trainer.grammar.token_masks import is_allowed

        allowed_V = torch.tensor([is_allowed(mask, token) for token in range(len(logits_V))])
        if self.masks == "narrow" and allowed_V.sum() > 1:
            allowed_V[self.forbids] = False
        return logits_V.masked_fill(~allowed_V, -torch.inf)

    def text(self, ids: list[int]) -> str:
        return str(self.base.tokenizer.decode(ids, skip_special_tokens=True))


@dataclass(frozen=True)
class Drawn:
    """A token that was drawn, and the logprobs of the vocabulary that the server reports there."""

    token: int
    logprobs_V: "torch.Tensor"


def _nucleus(logprobs_V: "torch.Tensor", top_p: float) -> "torch.Tensor":
    """The logprobs over the likeliest tokens whose mass is at least `top_p`."""
    import torch

    if top_p == 1:
        return logprobs_V
    sorted_V, order_V = logprobs_V.sort(descending=True)
    is_cut_V = sorted_V.exp().cumsum(-1) - sorted_V.exp() >= top_p
    return logprobs_V.index_fill(0, order_V[is_cut_V], -torch.inf).log_softmax(-1)


def _logprobs(sampled: list[Drawn], body: dict[str, Any]) -> dict[str, Any]:
    """The logprobs of tokens in the form of vLLM, where none is less than -9999."""
    own = [max(float(one.logprobs_V[one.token]), -9999.0) for one in sampled]
    if not body["logprobs"]:
        return {"token_logprobs": own}
    top = []
    for one in sampled:
        likeliest = one.logprobs_V.topk(min(body["logprobs"], len(one.logprobs_V)))
        names = [f"token_id:{token}" for token in (one.token, *likeliest.indices.tolist())]
        values = [float(one.logprobs_V[one.token]), *likeliest.values.tolist()]
        top.append({n: max(value, -9999.0) for n, value in zip(names, values, strict=True)})
    return {"token_logprobs": own, "top_logprobs": top}


def num_sampled(fake: FakeVllm) -> int:
    """Completions that were asked of it, less the canary's."""
    return sum(not body["ignore_eos"] for body in fake.asked)


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


@asynccontextmanager
async def fake_vllms(*fakes: FakeVllm) -> AsyncIterator[tuple[str, ...]]:
    """The addresses of these servers, which answer until the block ends."""
    for fake in fakes:
        await fake.start()
    try:
        yield tuple(fake.url for fake in fakes)
    finally:
        for fake in fakes:
            assert fake.task is not None
            if not fake.task.done():
                await fake.die()
