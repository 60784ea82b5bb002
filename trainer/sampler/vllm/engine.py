"""The vLLM sampler: `schemas.sampling.Sampler` over one server or many.

The templates and their date, tokenising, the continuation of sampled ids, and the end of a completion
are the same as in the torch engine (`trainer/sampler/completion.py`). A server receives token ids and a
seed, and returns token ids and logprobs. Of a forced answer it receives the grammar, and the masks that
it applied are checked (`server_masks.py`). The seed is derived from the same key as the torch engine's
draws. So when a server dies and another server samples again, the sample is the same up to the rounding
of the servers' kernels.
"""

import hashlib
from dataclasses import replace
from functools import partial

from schemas.errors import Refused, TransientError
from schemas.models.sampling_server import SamplingServer
from schemas.sampling import DrawKey, SampleRequest, Tell, Turn
from trainer.lru_cache import LruCache
from trainer.model.chat_template import Chat
from trainer.model.lora_names import Scaling, adapter_magnitudes
from trainer.sampler.completion import TOP_P, Completion, Version, new_completion
from trainer.sampler.partial_text import PartialText
from trainer.sampler.prompt_length import count_tokens, prepare_apart
from trainer.sampler.top_logprobs import with_top_logprobs
from trainer.sampler.vllm.canary import compute_learner_logprobs
from trainer.sampler.vllm.client import CompletionRequest, SampledTokens, ServerGone, UnknownAdapter
from trainer.sampler.vllm.fleet import Fleet, VllmServers
from trainer.sampler.vllm.server_masks import (
    NUM_LIKELIEST,
    refuse_other_logprobs,
    refuse_other_mask,
)
from trainer.sampler.vllm.server_state import Replica, TargetVersion
from trainer.sampler.vllm.whole_weights import OtherWeights, confirm_weights
from trainer.weight_cache import WeightCache

TRIES = 6
"""How often a request is tried. A try fails when its server breaks off or has lost the version."""


class VllmSampler:
    """Samples on vLLM servers. Base models and versions come from `cache`, because the tokenizer is
    needed here, and because the canary compares with the learner's own forward pass."""

    def __init__(self, cache: WeightCache, servers: VllmServers) -> None:
        self._cache = cache
        self.fleet = Fleet(servers, device=cache.device)
        self._chats: LruCache[Chat] = LruCache(4)
        self._checked_grammars: LruCache[bool] = LruCache(1024)
        self._closed = False

    @property
    def concurrency(self) -> int:
        """How many completions the servers compute together."""
        return self.fleet.concurrency

    async def sample(self, request: SampleRequest) -> Turn:
        """Sample one completion and return it as a turn. Raises UserCodeError(PROMPT_TOO_LONG) when the
        prompt does not fit, Refused when vLLM cannot serve the request, CorruptData when all servers are
        fenced, and TransientError when no server answers."""
        _refuse_unsupported(request)
        return await self._sample_anywhere(request, await self._target_of(request), None)

    async def stream(self, request: SampleRequest, tell: Tell) -> Turn:
        """Sample one completion, and tell its text as the server sends tokens. Raises what `sample`
        raises."""
        _refuse_unsupported(request)
        return await self._sample_anywhere(
            request, await self._target_of(request), PartialText(tell)
        )

    async def count_prompt_tokens(self, request: SampleRequest) -> int:
        """Return how many tokens the prompt of a request has."""
        target = await self._target_of(request)
        context = target.version.loaded.base.context
        return await count_tokens(request, target.chat, context=context)

    async def prepare(self, request: SampleRequest) -> None:
        """Wait for a server, and load the version into all servers that are up. Raises the errors of
        `sample`, except PROMPT_TOO_LONG."""
        _refuse_unsupported(request)
        target = await self._target_of(request)
        async with self.fleet.serving(target, affinity=affinity_of(request.key)):
            pass

    async def _target_of(self, request: SampleRequest) -> TargetVersion:
        """The version that a request is sampled from. Raises TransientError when this engine is
        closed."""
        if self._closed:
            raise TransientError("the sampling engine has closed; another worker will sample this")
        loaded = await self._cache.load_model(request.model)
        trained = await self._cache.load_tensors(request.policy)
        if adapter_magnitudes(trained):
            raise Refused(
                "vLLM does not serve DoRA adapters (advanced.lora_variant = 'dora'): set "
                "HEADRACE_SAMPLER=torch, train with lora_variant = 'lora', or merge the checkpoint with "
                "`headrace checkpoint merge` and serve the model that it writes"
            )
        key, weights = request.model.model_dump_json(), request.policy.weights
        dated = f"{key}|{request.params.date}"
        chat = self._chats.get(dated) or self._chats.put(
            dated,
            Chat(loaded.base.tokenizer, loaded.base.stop_ids, date=request.params.date),
        )
        scaling = Scaling(request.lora_alpha, request.lora_scaling)
        version = Version(key, "", loaded, trained, scaling)
        is_full = request.tuning == "full" and weights is not None
        return TargetVersion(version, chat, weights.sha256 if weights else None, is_full=is_full)

    async def _sample_anywhere(
        self, request: SampleRequest, target: TargetVersion, told: PartialText | None
    ) -> Turn:
        """Try servers until one answers, at most TRIES times. A server that breaks off is left out until
        it answers again, and an answer is dropped when other weights may have given it. Raises
        TransientError when all tries failed, and OtherWeights when that was why the last one did."""
        affinity = affinity_of(request.key)
        last: Exception | None = None
        for _ in range(TRIES):
            async with self.fleet.serving(
                target, affinity=affinity, avoid=request.avoid
            ) as replica:
                try:
                    return await self._sample_on(request, target, replica, told)
                except ServerGone as error:
                    self.fleet.mark_lost(replica, error)
                    last = error
                except UnknownAdapter as error:
                    replica.holds.discard(target.name)
                    last = error
                except OtherWeights as error:
                    last = error
        failed = OtherWeights if isinstance(last, OtherWeights) else TransientError
        raise failed(f"{TRIES} tries to sample failed; the last: {last}") from last

    async def _sample_on(
        self,
        request: SampleRequest,
        target: TargetVersion,
        replica: Replica,
        told: PartialText | None,
    ) -> Turn:
        assert replica.card is not None  # noqa: S101 - it is serving
        label = replica.label
        context = min(target.version.loaded.base.context, replica.card.max_model_len)
        row = await prepare_apart(
            request,
            partial(
                new_completion,
                *(request, target.version, target.chat),
                context=context,
                masks_over="vllm",
            ),
        )
        completion_request = CompletionRequest(
            prompt_ids=row.prompt_ids,
            max_new_tokens=row.max_new_tokens,
            temperature=request.params.temperature,
            seed=row.rng.seed,
            top_p=request.params.top_p,
            stop=request.params.stop,
            stop_ids=sorted(row.stop_ids),
            grammar=row.grammar.text if row.grammar else None,
            num_likeliest=NUM_LIKELIEST if row.grammar else 0,
        )
        model = replica.model(target)
        if told is None:
            answer = await replica.server.complete(model, completion_request)
        else:
            shown = replace(row, completion_ids=[], logprobs=[], grammar=None)
            arrived = partial(_tell_tokens, shown, told)
            answer = await replica.server.stream(model, completion_request, arrived)
        await confirm_weights(replica, label)
        turn = _to_turn(row, answer, replica.server.url)
        if turn.grammar is not None:
            await self._check_first_answer(turn, row, target, replica)
        turn = await with_top_logprobs(turn, row, request, self._cache.device)
        noise = replica.noise.get(target.base_key)
        server = None if noise is None else SamplingServer(url=replica.server.url, noise=noise)
        alarm = "; ".join(self.fleet.warnings)
        return turn.model_copy(update={"server": server, "alarm": alarm or turn.alarm})

    async def _check_first_answer(
        self, turn: Turn, row: Completion, target: TargetVersion, replica: Replica
    ) -> None:
        """Compare the first answer of a server under a grammar with the learner. With top-p, which the
        learner does not know, nothing is compared. Raises UserCodeError when the server applied other
        masks."""
        assert turn.grammar is not None  # noqa: S101 - it is forced
        about = f"{replica.server.url}|{target.base_key}|{turn.grammar.text}"
        key = hashlib.sha256(about.encode()).hexdigest()
        noise = replica.noise.get(target.base_key)
        if noise is None or row.params.top_p < 1 or self._checked_grammars.get(key):
            return
        version = target.version
        learner = await self._cache.device.run(
            compute_learner_logprobs,
            *(
                version.loaded,
                version.trained,
                version.scaling,
                turn,
                row.params.temperature or 1.0,
            ),
        )
        refuse_other_logprobs(replica.server.url, turn.logprobs, learner, noise=noise)
        self._checked_grammars.put(key, value=True)

    async def aclose(self) -> None:
        """Refuse new requests, and unload our adapters from the servers."""
        self._closed = True
        await self.fleet.aclose()


def affinity_of(key: DrawKey) -> str:
    """The key that keeps the samples of a group on one server."""
    return f"{key.purpose}/{key.step}/{key.slot}/{key.replacement}"


def _tell_tokens(row: Completion, told: PartialText, tokens: SampledTokens) -> None:
    """Tell the text of tokens that have arrived. Whether they are valid is checked at the end."""
    for token, logprob in zip(tokens.ids, tokens.logprobs, strict=False):
        if not row.is_over:
            row.append(token, logprob)
    told.update(row)


def _to_turn(row: Completion, answer: SampledTokens, url: str) -> Turn:
    """Convert the sampled tokens to a turn. Raises ServerGone unless they end where a completion must
    end, and UserCodeError when they were drawn under other masks than ours."""
    for number, (token, logprob) in enumerate(zip(answer.ids, answer.logprobs, strict=True)):
        if row.grammar_error is not None:
            break
        if row.is_over:
            raise ServerGone(f"the sampler {url} went on after the end of a completion")
        if row.grammar is not None:
            refuse_other_mask(
                *(url, row.grammar.allowed, token, answer.likeliest[number]),
                top_p=row.params.top_p,
            )
        row.append(token, logprob)
    if not row.is_over:
        raise ServerGone(f"the sampler {url} broke off in the middle of a completion")
    return row.to_turn()


def _refuse_unsupported(request: SampleRequest) -> None:
    if request.params.top_p < 1 and request.key.purpose == "train":
        raise Refused(TOP_P)
    if request.params.deterministic:
        raise Refused(
            "advanced.deterministic needs the torch sampler, because vLLM's results depend on what else "
            "is in its batch: set HEADRACE_SAMPLER=torch"
        )
