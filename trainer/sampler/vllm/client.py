"""The HTTP client of one vLLM server. It has the few calls that sampling needs, with token ids in
requests and answers.

A vLLM server applies the recommendations of its model directory (top-k, repetition penalty, ...) to each
request that does not set them. So a request here sets every parameter, and only the
temperature and top_p may change the distribution of a token.
"""

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from schemas.errors import FailureCategory, Refused, TransientError, UserCodeError

CONNECT_S = 5.0
ANSWER_S = 30.0
IDLE_S = 2.0
"""How many seconds an idle connection is kept. A server closes it after five idle seconds, and a request
at that moment would look as if the server had died."""
COMPLETION_S = 3600.0
"""How long a completion or new weights may take. Nothing arrives before a completion is finished, so a
short time-out would end long samples. The death of the server shows as a broken connection instead."""

NO_RUNTIME_LORA = (
    "does not load adapters while it runs: start it with --enable-lora and with "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
)
NO_NEW_WEIGHTS = (
    "takes no new weights while it runs, which advanced.tuning = 'full' needs: start a vLLM of 2026 "
    "(tested: 0.32) with VLLM_SERVER_DEV_MODE=1 in its environment, set advanced.tuning to lora, or "
    "sample with HEADRACE_SAMPLER=torch"
)


class ServerGone(TransientError):
    """The server does not answer, failed, or broke off a request."""


class UnknownAdapter(TransientError):
    """The server has no adapter of this name, because it was restarted or the adapter was unloaded."""


@dataclass(frozen=True, slots=True)
class ServerCard:
    """The facts that a server reports about itself. `base` is the name of its base model,
    `root` where the server has it from, and `max_model_len` its longest context in tokens. `adapters`
    maps each name to the path that the adapter was loaded from."""

    base: str
    max_model_len: int
    adapters: Mapping[str, str]
    root: str


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for one completion. With `stop_ids` None, only its length ends the completion. With a
    `grammar` the completion follows it, and the `num_likeliest` likeliest tokens are reported with each
    token."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float
    seed: int
    top_p: float = 1.0
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] | None = ()
    grammar: str | None = None
    num_likeliest: int = 0

    def body(self, model: str, *, stream: bool = False) -> dict[str, object]:
        forced: dict[str, object] = (
            {}
            if self.grammar is None
            else {
                "structured_outputs": {"grammar": self.grammar},
                "return_tokens_as_token_ids": True,
            }
        )
        return forced | {
            "model": model,
            "prompt": list(self.prompt_ids),
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "top_p": self.top_p,
            "stop": list(self.stop),
            "stop_token_ids": sorted(self.stop_ids or ()),
            "ignore_eos": self.stop_ids is None,
            "top_k": 0,
            "min_p": 0.0,
            "min_tokens": 0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "echo": False,
            "stream": stream,
            "logprobs": self.num_likeliest,
            "return_token_ids": True,
            "skip_special_tokens": True,
            "add_special_tokens": False,
        }


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled token ids, the logprob with which each was sampled, and the likeliest tokens in its
    place, if they were asked for, each with its logprob."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    likeliest: tuple[Mapping[int, float], ...] = ()


NO_TOKENS = SampledTokens((), ())


class VllmServer:
    """The server at `url`. The methods raise ServerGone when the server does not answer or fails, and
    Refused when it answers that it can never serve the request."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url
        alive = [
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ]
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S, pool=None),
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S),
                socket_options=alive,
            ),
        )

    async def card(self) -> ServerCard:
        """Fetch the server's base model and its adapters."""
        answer = self._check_status(await self._send("GET", "/v1/models"))
        try:
            models = answer.json()["data"]
            base = next(model for model in models if not model.get("parent"))
            adapters = {m["id"]: str(m.get("root")) for m in models if m.get("parent")}
            root = str(base.get("root") or base["id"])
            return ServerCard(str(base["id"]), int(base["max_model_len"]), adapters, root)
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            raise self._not_vllm_error(answer) from error

    async def complete(self, model: str, ask: CompletionRequest) -> SampledTokens:
        """Sample one completion. Raises UnknownAdapter when the server has no model of this name."""
        answer = await self._send(
            "POST", "/v1/completions", ask.body(model), timeout_s=COMPLETION_S
        )
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise UnknownAdapter(f"{self.url} has no model {model}: {_error_message(answer)}")
        self._check_grammar(answer, ask)
        found = _tokens_of(self._parse_choice(self._check_status(answer)), ask)
        if found is None or not found.ids:
            raise self._no_ids_error()
        return found

    async def stream(
        self, model: str, ask: CompletionRequest, arrived: Callable[[SampledTokens], None]
    ) -> SampledTokens:
        """Sample one completion, and call `arrived` with its tokens as the server sends them. Raises
        what `complete` raises."""
        timeout = httpx.Timeout(COMPLETION_S, connect=CONNECT_S, pool=None)
        body = ask.body(model, stream=True)
        parts: list[SampledTokens] = []
        try:
            async with self._http.stream(
                "POST", "/v1/completions", json=body, timeout=timeout
            ) as answer:
                if not answer.is_success:
                    await answer.aread()
                if answer.status_code == httpx.codes.NOT_FOUND:
                    said = _error_message(answer)
                    raise UnknownAdapter(f"{self.url} has no model {model}: {said}")
                self._check_grammar(answer, ask)
                async for line in self._check_status(answer).aiter_lines():
                    tokens = self._parse_line(line, ask)
                    if tokens.ids:
                        parts.append(tokens)
                        arrived(tokens)
        except httpx.TransportError as error:
            raise ServerGone(f"the sampler {self.url} does not answer: {error!r}") from error
        if not parts:
            raise self._no_ids_error()
        return SampledTokens(
            tuple(token for part in parts for token in part.ids),
            tuple(logprob for part in parts for logprob in part.logprobs),
            tuple(likeliest for part in parts for likeliest in part.likeliest),
        )

    def _check_grammar(self, answer: httpx.Response, ask: CompletionRequest) -> None:
        """Raises UserCodeError when the server refuses the grammar of a request."""
        if ask.grammar is not None and answer.status_code == httpx.codes.BAD_REQUEST:
            raise UserCodeError(
                FailureCategory.VALIDATION,
                f"the sampler {self.url} cannot force this answer: {_error_message(answer)[:300]}. "
                "Simplify the schema, start vLLM with the structured outputs backend guidance, or set "
                "HEADRACE_SAMPLER=torch",
            )

    def _parse_line(self, line: str, ask: CompletionRequest) -> SampledTokens:
        """The tokens of one line of a stream, which may have none."""
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            return NO_TOKENS
        try:
            event = json.loads(data)
            if "error" in event:
                raise ServerGone(f"the sampler {self.url} failed: {str(event['error'])[:300]}")
            choices = [_tokens_of(choice, ask) for choice in event["choices"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(
                f"{self.url} does not stream like vLLM's OpenAI server: {data[:200]!r}. Check "
                "HEADRACE_SAMPLER"
            ) from error
        if None in choices:
            raise self._no_ids_error()
        return next((tokens for tokens in choices if tokens), NO_TOKENS)

    def _no_ids_error(self) -> Refused:
        return Refused(
            f"the sampler {self.url} answers without token ids and their logprobs: start a vLLM "
            "that supports return_token_ids (0.10.2 or newer)"
        )

    async def load(self, name: str, folder: Path) -> None:
        """Load the adapter in `folder` under `name`. The server must see the folder under the same path.
        It is not an error if the adapter is loaded already."""
        body = {"lora_name": name, "lora_path": str(folder)}
        answer = await self._send("POST", "/v1/load_lora_adapter", body)
        said = _error_message(answer)
        if answer.is_client_error and "already" in said:
            return
        if answer.status_code == httpx.codes.NOT_FOUND and said == "Not Found":
            raise Refused(f"the sampler {self.url} {NO_RUNTIME_LORA}")
        if answer.is_success:
            return
        if answer.is_server_error:
            # An adapter that it cannot serve gives the same status as a failure of the server.
            self._check_status(await self._send("GET", "/health"))
        raise Refused(
            f"the sampler {self.url} cannot serve the adapter in {folder}: {said}. {_advice(said)}"
        )

    async def unload(self, name: str) -> None:
        """Unload an adapter. It is not an error if the server does not have it."""
        await self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def weight_label(self) -> str | None:
        """The label of the weights that the server computes with; None when its weights cannot be
        replaced while it runs, also because a proxy before it refuses that."""
        answer = await self._send("GET", "/weight_info")
        if answer.is_client_error and answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
            return None
        try:
            return str(self._check_status(answer).json()["weight_version"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._not_vllm_error(answer) from error

    async def set_weight_label(self, label: str) -> None:
        """Set the label that `weight_label` returns from now on."""
        self._check_status(
            await self._send("POST", "/update_weight_version", {"new_version": label})
        )

    async def reload_weights(self, path: str) -> None:
        """Replace all weights by those in a model directory that the server sees. Raises Refused when
        it cannot load them."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        answer = await self._send("POST", "/collective_rpc", body, timeout_s=COMPLETION_S)
        if answer.is_server_error:
            # Weights that it cannot load give the same status as a failure of the server.
            self._check_status(await self._send("GET", "/health"))
            raise Refused(
                f"the sampler {self.url} cannot load the weights in {path}: {_error_message(answer)}. "
                "Check that it sees HEADRACE_VLLM_ADAPTERS under the same path; its log has the reason"
            )
        self._check_status(answer)

    async def reset_prefix_cache(self) -> None:
        """Drop the cached keys and values of all prompts. Raises ServerGone when they are still in
        use."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        answer = self._check_status(await self._send("POST", path))
        if not answer.json().get("success"):
            raise ServerGone(f"the sampler {self.url} does not drop its prefix cache")

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _send(
        self, method: str, path: str, body: object = None, *, timeout_s: float = ANSWER_S
    ) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None)
        try:
            return await self._http.request(method, path, json=body, timeout=timeout)
        except httpx.TransportError as error:
            raise ServerGone(f"the sampler {self.url} does not answer: {error!r}") from error

    def _check_status(self, answer: httpx.Response) -> httpx.Response:
        """Return the response if it is a success. Raises ServerGone for an error of the server, and
        Refused for an error of the request."""
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS or answer.is_server_error:
            raise ServerGone(
                f"the sampler {self.url} failed ({answer.status_code}): {_error_message(answer)}"
            )
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise Refused(f"the sampler {self.url} requires an API key: set HEADRACE_VLLM_API_KEY")
        if not answer.is_success:
            raise Refused(
                f"the sampler {self.url} refused ({answer.status_code}): {_error_message(answer)}"
            )
        return answer

    def _parse_choice(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            (choice,) = answer.json()["choices"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._not_vllm_error(answer) from error
        return dict(choice)

    def _not_vllm_error(self, answer: httpx.Response) -> Refused:
        return Refused(
            f"{self.url} does not answer like vLLM's OpenAI server: {answer.text[:200]!r}. Check "
            "HEADRACE_SAMPLER"
        )


def _tokens_of(choice: Mapping[str, Any], ask: CompletionRequest) -> SampledTokens | None:
    """The tokens of a choice, or of a part of it; None if it has ids without logprobs or the reverse."""
    ids = choice.get("token_ids") or ()
    found = choice.get("logprobs") or {}
    logprobs = found.get("token_logprobs") or ()
    shown = (found.get("top_logprobs") or ()) if ask.num_likeliest else ()
    if len(ids) != len(logprobs) or (ask.num_likeliest and len(shown) != len(ids)):
        return None
    likeliest = tuple(
        {int(name.removeprefix("token_id:")): float(logprob) for name, logprob in place.items()}
        for place in shown
    )
    return SampledTokens(tuple(map(int, ids)), tuple(map(float, logprobs)), likeliest)


def _error_message(answer: httpx.Response) -> str:
    """The message in the body of an error response."""
    try:
        body = answer.json()
        error = body.get("error", body)
        return str(error.get("message") or error.get("detail"))
    except (ValueError, AttributeError):
        return answer.text[:300]


def _advice(said: str) -> str:
    if "rank" in said.lower():
        return (
            "Start it with a --max-lora-rank of at least advanced.lora_rank "
            "(vLLM knows 1, 8, 16, 32, 64, 128, 256, 320, 512), or lower advanced.lora_rank"
        )
    return (
        "Check that it sees HEADRACE_VLLM_ADAPTERS under the same path, and that it supports "
        "advanced.lora_targets for its model"
    )
