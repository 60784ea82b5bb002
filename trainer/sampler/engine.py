"""The torch sampler: it decodes the completions of many callers together (`schemas.sampling.Sampler`).

Callers wait on futures in the event loop. The device thread decodes the rows that are there, a few steps
at a time, so that new rows can join and learner jobs get their turn.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from schemas.errors import Refused, TransientError
from schemas.sampling import SampleRequest, SamplingParams, Tell, Turn
from trainer.lru_cache import LruCache
from trainer.model.chat_template import Chat
from trainer.model.lora_names import Scaling, Tensors
from trainer.policy import LoadedModel
from trainer.sampler.batcher import KEPT_MODELS, Batcher
from trainer.sampler.completion import TOP_P, Completion, Version, new_completion
from trainer.sampler.memory_limits import memory_limits_of
from trainer.sampler.partial_text import PartialText
from trainer.sampler.prompt_length import count_tokens, prepare_apart
from trainer.sampler.top_logprobs import with_top_logprobs
from trainer.weight_cache import WeightCache

logger = logging.getLogger(__name__)

APART_S = 0.001
"""An idle engine starts to decode when no request has arrived for this many seconds. That is a small
part of the time that a short answer takes."""
COMPANY_S = 0.02
"""An idle engine starts to decode after this many seconds at the latest."""


class TorchSampler:
    """The sampler of this device. It decodes on the device's thread."""

    def __init__(self, cache: WeightCache) -> None:
        self._cache = cache
        self._batcher = self._new_batcher()
        self._listening: dict[int, tuple[Completion, PartialText]] = {}
        self._arrivals: deque[tuple[Completion, asyncio.Future[None]]] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._chats: LruCache[Chat] = LruCache(4)
        self._closed = False
        self._last: Completion | None = None
        self._ahead: asyncio.Task[None] | None = None
        cache.on_kept = self._prepare_ahead

    @property
    def concurrency(self) -> int:
        """How many completions of one version it decodes together."""
        return memory_limits_of(self._cache.device.torch).most_rows

    def _new_batcher(self) -> Batcher:
        """An empty batcher, with room for as many decode models as there are versions."""
        return Batcher(models=max(KEPT_MODELS, self._cache.versions - 2))

    async def sample(self, request: SampleRequest) -> Turn:
        """Sample one completion. Raises UserCodeError(PROMPT_TOO_LONG) when the prompt does not
        fit, Refused for what training must not do, TransientError when the engine has closed."""
        row = await self._new_row(request)
        return await with_top_logprobs(
            await self._wait_for_turn(row), row, request, self._cache.device
        )

    async def stream(self, request: SampleRequest, tell: Tell) -> Turn:
        """Sample one completion, and tell its text after each step. Raises what `sample` raises."""
        row = await self._new_row(request)
        self._listening[id(row)] = (row, PartialText(tell))
        try:
            turn = await self._wait_for_turn(row)
        finally:
            del self._listening[id(row)]
        return await with_top_logprobs(turn, row, request, self._cache.device)

    async def _new_row(self, request: SampleRequest) -> Completion:
        if request.params.top_p < 1 and request.key.purpose == "train":
            raise Refused(TOP_P)
        loaded = await self._cache.load_model(request.model)
        trained = await self._cache.load_tensors(request.policy)
        weights = request.policy.weights
        scaling = Scaling(request.lora_alpha, request.lora_scaling)
        base = f"{request.model.model_dump_json()}|{scaling}"
        sha256 = weights.sha256 if weights else ""
        version = Version(base, sha256, loaded, trained, scaling)
        chat, context = self._chat(request, loaded), loaded.base.context
        row = await prepare_apart(
            request, partial(new_completion, request, version, chat, context=context)
        )
        self._last = row
        return row

    async def count_prompt_tokens(self, request: SampleRequest) -> int:
        """Return how many tokens the prompt of a request has."""
        loaded = await self._cache.load_model(request.model)
        chat = self._chat(request, loaded)
        return await count_tokens(request, chat, context=loaded.base.context)

    async def prepare(self, request: SampleRequest) -> None:
        """Load base model and weights. Raises what `sample` raises."""
        await self._cache.load_model(request.model)
        await self._cache.load_tensors(request.policy)

    def _prepare_ahead(self, sha256: str, trained: dict[str, torch.Tensor]) -> None:
        """Called when the learner has made a version. If the version has the shapes of those that are
        sampled, requests for it are likely once it is published, so it is prepared in the meantime. A
        wrong guess costs only time that nobody waits for."""
        last = self._last
        if self._closed or last is None or not have_equal_shapes(last.version.trained, trained):
            return
        version = replace(last.version, sha256=sha256, trained=trained)
        self._ahead = asyncio.create_task(self._prepare(version, last.params))

    async def _prepare(self, version: Version, params: SamplingParams) -> None:
        try:
            await self._cache.device.run(self._batcher.prepare, version, params)
        except Exception as error:  # a request for this version will raise it
            logger.warning("a version could not be prepared ahead: %r", error)

    def _chat(self, request: SampleRequest, loaded: LoadedModel) -> Chat:
        date, base = request.params.date, loaded.base
        key = f"{request.model.model_dump_json()}|{date}"
        chat = self._chats.get(key)
        return chat or self._chats.put(key, Chat(base.tokenizer, base.stop_ids, date=date))

    async def _wait_for_turn(self, row: Completion) -> Turn:
        if self._closed:
            raise TransientError("the sampling engine has closed; another worker will sample this")
        future = asyncio.get_running_loop().create_future()
        self._arrivals.append((row, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._decode())
        try:
            await future
        finally:
            row.is_cancelled = row.finish is None
        return row.to_turn()

    async def _decode(self) -> None:
        """Feed the device thread while there are rows to sample."""
        waiting: Waiting = {}
        try:
            while self._arrivals or self._batcher.is_busy:
                if not self._batcher.is_busy:
                    await self._wait_for_company()
                await self._decode_turn(waiting)
        finally:
            waiting |= {id(row): (row, future) for row, future in self._arrivals}
            self._arrivals.clear()
            _fail(waiting, TransientError("the sampling engine has closed; sample this again"))

    async def _wait_for_company(self) -> None:
        """Wait for requests that arrive at about the same time. The samples of a user's workflow arrive
        one by one; if decoding started at once, the first would decode alone."""
        loop = asyncio.get_running_loop()
        until, known = loop.time() + COMPANY_S, 0
        while len(self._arrivals) > known and loop.time() < until:
            known = len(self._arrivals)
            await asyncio.sleep(APART_S)

    async def _decode_turn(self, waiting: "Waiting") -> None:
        """Hand over the new rows, decode for a turn, and wake the callers whose rows are over. If
        decoding fails, all waiting callers fail, and the next ones find an empty batcher. While someone
        listens, a turn is one step."""
        arrived = [self._arrivals.popleft() for _ in range(len(self._arrivals))]
        waiting |= {id(row): (row, future) for row, future in arrived}
        rows = [row for row, _ in arrived]
        try:
            over = await self._cache.device.run(
                self._batcher.advance, rows, lambda: bool(self._arrivals or self._listening)
            )
        except torch.OutOfMemoryError as error:
            self._batcher = self._new_batcher()
            params = [row.params for row, _ in waiting.values()]
            refused = Refused(out_of_memory_advice(params))
            refused.__cause__ = error
            _fail(waiting, refused)
            return
        except Exception as error:  # callers must get any error
            self._batcher = self._new_batcher()
            _fail(waiting, TransientError(f"sampling failed: {error!r}; it will be tried again"))
            return
        for row, told in self._listening.values():
            told.update(row)
        for row in over:
            _, future = waiting.pop(id(row))
            if not future.done():
                future.set_result(None)
        await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Refuse new requests, and fail those that wait."""
        self._closed = True
        if self._ahead is not None:
            await asyncio.gather(self._ahead, return_exceptions=True)
        if self._pump is None or self._pump.done():
            return
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)


def have_equal_shapes(one: Tensors, other: Tensors) -> bool:
    """Whether these are tensors of the same names and shapes."""
    return {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in other.items()}


Waiting = dict[int, tuple[Completion, asyncio.Future[None]]]
"""Rows on the device thread by their identity, and the futures of their callers."""


def out_of_memory_advice(params: Sequence[SamplingParams]) -> str:
    """Which settings to lower when rows do not fit. A row's cache grows with its prompt and answer."""
    prompt = max((p.max_prompt_tokens for p in params), default=0)
    answer = max((p.max_new_tokens for p in params), default=0)
    return (
        f"the sampler's device ran out of memory: lower training.max_answer_length (it is {answer}) "
        f"or training.max_prompt_length ({prompt}). Or reduce the learner's part of the memory: lower "
        "advanced.micro_batch_tokens, or set HEADRACE_WORKERS=one, so that the two take turns"
    )


def _fail(waiting: Waiting, error: Exception) -> None:
    for _, future in waiting.values():
        if not future.done():
            future.set_exception(error)
    waiting.clear()
