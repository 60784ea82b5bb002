"""Sampling: exact ids and logprobs; in deterministic mode the bits depend on the sample alone."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from schemas.artifact_refs import ArtifactRef
from schemas.errors import FailureCategory, Refused, TransientError, UserCodeError
from schemas.learner import LearnerState
from schemas.sampling import Message, PolicyRef, SampleRequest, SamplingParams, Turn
from tests.unit.trainer.support import TINY, Shelf, job, request, weights_of
from trainer.engine import Engine
from trainer.model.base import build_base
from trainer.sampler import prefill, prompt_cache
from trainer.sampler.batcher import FIXED_ROWS, Batcher
from trainer.sampler.completion import Completion, Version
from trainer.sampler.decode_model import DecodeModel
from trainer.sampler.engine import TorchSampler
from trainer.sampler.memory_limits import CPU
from trainer.sampler.prefill import Prompt

PROMPTS = ("hi", "What is 47 + 38?", "a somewhat longer prompt, to be sure")


def many(**params: Any) -> list[SampleRequest]:
    """Samples of several groups, some long enough to outgrow their batch."""
    return [
        request(
            text,
            slot=slot,
            sample=i,
            deterministic=True,
            max_new_tokens=70 if i == 0 else 9,
            **params,
        )
        for slot, text in enumerate(PROMPTS)
        for i in range(4)
    ]


async def together(engine: Engine, requests: list[SampleRequest]) -> list[Turn]:
    return list(await asyncio.gather(*(engine.sampler.sample(r) for r in requests)))


async def test_bits_do_not_depend_on_company_order_or_timing(engine: Engine) -> None:
    requests = many()
    alone = [await engine.sampler.sample(r) for r in requests]
    assert await together(engine, requests) == alone

    order = list(range(len(requests)))
    random.Random(5).shuffle(order)
    shuffled = await together(engine, [requests[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(len(requests))] == alone

    async def late(i: int) -> Turn:
        for _ in range(3 * i):
            await asyncio.sleep(0)
        return await engine.sampler.sample(requests[i])

    assert list(await asyncio.gather(*(late(i) for i in order))) == [alone[i] for i in order]


async def test_those_who_come_one_by_one_begin_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workflow's samples arrive one after another. Twin: without the wait the first one begins
    alone."""
    begun: list[int] = []
    begin = Batcher._begin

    def counted(
        self: Batcher, rows: Sequence[Completion], prompts: Sequence[Prompt], *, fixed: bool
    ) -> list[Completion]:
        begun.append(len(rows))
        return begin(self, rows, prompts, fixed=fixed)

    async def late(i: int) -> Turn:
        for _ in range(3 * i):
            await asyncio.sleep(0)
        return await engine.sampler.sample(request(sample=i))

    await engine.sampler.sample(request())
    monkeypatch.setattr(Batcher, "_begin", counted)
    monkeypatch.setattr("trainer.sampler.engine.APART_S", 0.25)
    for most, first in ((2.0, 6), (0.0, 1)):
        monkeypatch.setattr("trainer.sampler.engine.COMPANY_S", most)
        begun.clear()
        await asyncio.gather(*(late(i) for i in range(6)))
        assert begun[0] == first


async def test_a_full_lane_gives_the_same_bits_as_an_empty_one(engine: Engine) -> None:
    requests = [request("x", sample=i, deterministic=True, max_new_tokens=5) for i in range(80)]
    crowd = await together(engine, requests)
    assert [await engine.sampler.sample(requests[i]) for i in (0, 41, 79)] == [
        crowd[i] for i in (0, 41, 79)
    ]


async def test_another_engine_gives_the_same_bits(engine: Engine, shelf: Shelf) -> None:
    requests = many()
    other = Engine(fetch=shelf.fetch, threads=1)
    assert await together(engine, requests) == await together(other, requests)
    await other.aclose()


async def test_draws_differ_by_key(engine: Engine) -> None:
    turns = await together(engine, [request(sample=i, max_new_tokens=16) for i in range(6)])
    assert len({turn.completion_ids for turn in turns}) == 6
    seeds = await together(engine, [request(seed=i, max_new_tokens=16) for i in range(6)])
    assert len({turn.completion_ids for turn in seeds}) == 6


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_transformers(
    engine: Engine, deterministic: bool, temperature: float
) -> None:
    asked = [
        request(t, deterministic=deterministic, temperature=temperature, max_new_tokens=70)
        for t in PROMPTS
    ]
    model = build_base(TINY, {}, device=torch.device("cpu")).model
    for turn in await together(engine, asked):
        ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(turn.prompt_ids) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1)
        chosen = expected.gather(-1, torch.tensor(turn.completion_ids)[:, None])[:, 0]
        assert turn.logprobs == pytest.approx(chosen.tolist(), abs=1e-5)


async def test_temperature_zero_is_the_argmax(engine: Engine) -> None:
    turn = await engine.sampler.sample(request(temperature=0.0))
    model = build_base(TINY, {}, device=torch.device("cpu")).model
    ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
    with torch.no_grad():
        best = model(ids).logits[0, len(turn.prompt_ids) - 1 : -1].argmax(-1)
    assert turn.completion_ids == tuple(best.tolist())
    again = await engine.sampler.sample(request(temperature=0.0, seed=9))
    assert again.completion_ids == turn.completion_ids


async def test_samples_follow_the_distribution(engine: Engine) -> None:
    turns = await together(
        engine, [request("z", sample=i, max_new_tokens=1, temperature=0.5) for i in range(600)]
    )
    model = build_base(TINY, {}, device=torch.device("cpu")).model
    with torch.no_grad():
        logits = model(torch.tensor([turns[0].prompt_ids])).logits[0, -1]
    expected = (logits / 0.5).softmax(-1)
    counts = torch.bincount(
        torch.tensor([t.completion_ids[0] for t in turns]), minlength=len(expected)
    )
    chi_square = ((counts - 600 * expected) ** 2 / (600 * expected)).sum()
    assert float(chi_square) < len(expected) + 6 * (2 * len(expected)) ** 0.5


async def test_the_token_that_ends_the_turn_is_an_action(engine: Engine) -> None:
    turns = await together(engine, [request(sample=i, max_new_tokens=200) for i in range(8)])
    ended = [turn for turn in turns if turn.finish_reason == "stop"]
    assert ended
    for turn in ended:
        assert turn.completion_ids[-1] == 6
        assert 6 not in turn.completion_ids[:-1]
        assert len(turn.logprobs) == len(turn.completion_ids)
    cut = await engine.sampler.sample(request(max_new_tokens=1))
    assert (cut.finish_reason, len(cut.completion_ids)) in {("length", 1), ("stop", 1)}


async def test_a_stop_string_ends_the_text_before_it(engine: Engine) -> None:
    free = await engine.sampler.sample(request(max_new_tokens=20))
    stop = free.text[4:6]
    turn = await engine.sampler.sample(request(max_new_tokens=20, stop=(stop,)))
    assert turn.finish_reason == "stop"
    assert turn.text == free.text[: free.text.index(stop)]
    assert turn.completion_ids == free.completion_ids[: len(turn.completion_ids)]


async def test_a_prompt_that_does_not_fit_is_the_samples_failure(engine: Engine) -> None:
    for asked, has_room in (
        (request("x" * 50, max_prompt_tokens=40), True),
        (request("x" * 1100, max_prompt_tokens=5000), False),
    ):
        with pytest.raises(UserCodeError, match="at most") as failure:
            await engine.sampler.sample(asked)
        assert failure.value.category is FailureCategory.PROMPT_TOO_LONG
        assert ("raise max_prompt_length" in failure.value.message) is has_room


async def test_the_context_bounds_the_completion(engine: Engine) -> None:
    turn = await engine.sampler.sample(request("x" * 1015, max_new_tokens=8000))
    assert len(turn.prompt_ids) + len(turn.completion_ids) <= 1024


async def test_top_p_is_refused_in_training_and_cuts_in_evaluation(engine: Engine) -> None:
    with pytest.raises(Refused, match="rollout_top_p"):
        await engine.sampler.sample(request(top_p=0.9))
    asked = request(top_p=1e-6, max_new_tokens=6)
    asked = asked.model_copy(update={"key": asked.key.model_copy(update={"purpose": "evaluate"})})
    turn = await engine.sampler.sample(asked)
    greedy = await engine.sampler.sample(request(temperature=0.0, max_new_tokens=6))
    assert turn.completion_ids == greedy.completion_ids
    assert turn.logprobs == pytest.approx([0.0] * len(turn.logprobs))


async def test_versions_are_served_side_by_side(engine: Engine, shelf: Shelf) -> None:
    first = await engine.learner.initialize(job(seed=1))
    policies = [PolicyRef(version=0), shelf.policy(first.state)]
    asked = [request(policy=p, sample=i, deterministic=True) for p in policies for i in range(3)]
    mixed = await together(engine, asked)
    assert mixed == [await engine.sampler.sample(r) for r in asked]
    assert mixed[:3] == mixed[3:], "version 0 of an adapter is the base"
    assert shelf.num_fetched == 0, "the learner's version is handed over, not fetched"


async def test_a_version_from_elsewhere_is_fetched_once(engine: Engine, shelf: Shelf) -> None:
    first = await engine.learner.initialize(job(seed=1))
    policy = shelf.policy(first.state)
    other = Engine(fetch=shelf.fetch, threads=1)
    asked = [request(policy=policy, sample=i) for i in range(5)]
    assert await together(other, asked) == await together(engine, asked)
    assert shelf.num_fetched == 1
    await other.aclose()


async def test_cancelled_requests_leave_their_neighbours_alone(engine: Engine) -> None:
    keep = request(sample=1, deterministic=True, max_new_tokens=60)
    expected = await engine.sampler.sample(keep)
    drop = asyncio.create_task(engine.sampler.sample(request(sample=2, max_new_tokens=900)))
    stay = asyncio.create_task(engine.sampler.sample(keep))
    for _ in range(20):
        await asyncio.sleep(0)
    drop.cancel()
    assert await stay == expected
    with pytest.raises(asyncio.CancelledError):
        await drop


async def test_closing_fails_those_who_wait(shelf: Shelf) -> None:
    engine = Engine(fetch=shelf.fetch, threads=1)
    await engine.sampler.sample(request())
    waiting = [
        asyncio.create_task(engine.sampler.sample(request(sample=i, max_new_tokens=900)))
        for i in range(4)
    ]
    for _ in range(20):
        await asyncio.sleep(0)
    await engine.aclose()
    for answer in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(answer, TransientError | Turn)
    with pytest.raises(TransientError):
        await engine.sampler.sample(request())


async def test_an_engine_failure_reaches_every_caller_and_passes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Batcher) -> list[Completion]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Batcher, "_leave", broken)
    with pytest.raises(TransientError, match="out of memory"):
        await together(engine, [request(sample=i, max_new_tokens=5) for i in range(3)])
    monkeypatch.undo()
    await engine.sampler.sample(request())


async def test_rows_that_do_not_fit_into_memory_name_the_knobs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Batcher) -> list[Completion]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Batcher, "_leave", full)
    with pytest.raises(Refused, match=r"training\.max_answer_length \(it is 5\)"):
        await together(engine, [request(sample=i, max_new_tokens=5) for i in range(3)])
    monkeypatch.undo()
    await engine.sampler.sample(request())


async def test_logits_that_are_not_finite_fail_the_sample(engine: Engine, shelf: Shelf) -> None:
    first = await engine.learner.initialize(job(seed=1))
    version = await engine.sampler._cache.load_tensors(shelf.policy(first.state))
    for tensor in version.values():
        tensor.fill_(float("nan"))
    with pytest.raises(UserCodeError, match="not finite"):
        await engine.sampler.sample(request(policy=shelf.policy(first.state)))
    await engine.sampler.sample(request())


async def test_company_with_other_settings_changes_no_bits(engine: Engine) -> None:
    plain = request(deterministic=True)
    cut = plain.model_copy(
        update={
            "params": plain.params.model_copy(update={"top_p": 0.5}),
            "key": plain.key.model_copy(update={"purpose": "evaluate"}),
        }
    )
    alone = await engine.sampler.sample(plain)
    assert (await together(engine, [cut, plain, request(temperature=0.3, deterministic=True)]))[
        1
    ] == alone


async def test_rows_wait_for_memory_and_all_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = many()
    expected = await together(engine, asked)
    few = replace(CPU, rows_bytes=3 * 8 * 2 * 64 * 16)
    monkeypatch.setattr("trainer.sampler.batcher.memory_limits_of", lambda device: few)
    assert await together(engine, asked) == expected


async def test_other_architectures_are_sampled_through_transformers(
    engine: Engine, shelf: Shelf
) -> None:
    loaded = await engine.sampler._cache.load_model(TINY)
    first = await engine.learner.initialize(job(seed=1))
    engine.sampler._cache._loaded.put(TINY.model_dump_json(), replace(loaded, decoder=None))
    slow = [
        await engine.sampler.sample(request(policy=p, max_new_tokens=20, deterministic=True))
        for p in (PolicyRef(version=0), shelf.policy(first.state))
    ]
    engine.sampler._cache._loaded.put(TINY.model_dump_json(), loaded)
    fast = await engine.sampler.sample(request(max_new_tokens=20, deterministic=True))
    for turn in slow:
        assert turn.completion_ids == fast.completion_ids
        assert turn.logprobs == pytest.approx(fast.logprobs, abs=1e-5)


async def test_a_conversation_continues_the_exact_ids(engine: Engine) -> None:
    first = await engine.sampler.sample(request("hi", max_new_tokens=12))
    asked = request("hi", max_new_tokens=4)
    reply = Message(role="assistant", content=first.text)
    follow = Message(role="user", content="and?")
    second = asked.model_copy(
        update={
            "history": (first,),
            "history_messages": asked.messages,
            "messages": (*asked.messages, reply, follow),
        }
    )
    turn = await engine.sampler.sample(second)
    said = (*first.prompt_ids, *first.completion_ids)
    assert turn.prompt_ids[: len(said)] == said
    end = () if first.finish_reason == "stop" else (6,)
    suffix = turn.prompt_ids[len(said) :]
    assert suffix[: len(end)] == end
    assert suffix[len(end)] == 3


@pytest.mark.parametrize("deterministic", [False, True])
async def test_the_learner_s_next_version_is_made_ready_before_it_is_asked_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Twin: a version of another kind than the sampled ones is left alone."""
    first = await engine.learner.initialize(job(seed=1))
    await engine.sampler.sample(request(policy=_held(first.state.weights_file_sha256)))
    made: list[tuple[str, bool]] = []
    prepare = Batcher.prepare

    def seen(self: Batcher, version: Version, params: SamplingParams) -> None:
        made.append((version.sha256, params.deterministic))
        prepare(self, version, params)

    monkeypatch.setattr(Batcher, "prepare", seen)
    asked = request(policy=_held(first.state.weights_file_sha256), deterministic=deterministic)
    await engine.sampler.sample(asked)
    second = await engine.learner.initialize(job(seed=2, run="other"))
    sha256 = second.state.weights_file_sha256
    expected = await _sampled_elsewhere(engine, second.state, asked)
    assert made == [(sha256, deterministic)]
    monkeypatch.setattr("trainer.sampler.batcher.decode_model_of", None)
    assert await engine.sampler.sample(_with(asked, sha256)) == expected
    wider = await engine.learner.initialize(job(seed=3, run="wider", lora_rank=8))
    assert wider.state.weights_file_sha256 != sha256
    assert len(made) == 1


async def test_a_version_that_cannot_be_made_ready_fails_those_who_ask_for_it_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = await engine.learner.initialize(job(seed=1))
    asked = request(policy=_held(first.state.weights_file_sha256))
    await engine.sampler.sample(asked)

    def broken(*_: object, **__: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Batcher, "prepare", broken)
    second = await engine.learner.initialize(job(seed=2, run="other"))
    assert isinstance(engine.sampler, TorchSampler)
    assert engine.sampler._ahead is not None
    await engine.sampler._ahead
    assert "could not be prepared ahead" in caplog.text
    await engine.sampler.sample(_with(asked, second.state.weights_file_sha256))


def _held(sha256: str | None) -> PolicyRef:
    """A version that the learner has left on the device."""
    assert sha256 is not None
    return PolicyRef(version=0, weights=ArtifactRef(uri="memory:", sha256=sha256, size=1))


def _with(asked: SampleRequest, sha256: str | None) -> SampleRequest:
    return asked.model_copy(update={"policy": _held(sha256)})


async def _sampled_elsewhere(engine: Engine, state: LearnerState, asked: SampleRequest) -> Turn:
    """Sample on an engine that was not prepared for the version."""
    other = Engine(fetch=lambda _: weights_of(state), threads=1)
    turn = await other.sampler.sample(_with(asked, state.weights_file_sha256))
    await other.aclose()
    return turn


async def test_prompts_of_rows_that_come_together_are_read_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the rows fill more than one batch: a pass reads several prompts."""
    passes: list[int] = []
    read = prefill.read_prompts

    def counted(model: DecodeModel, prompts: Sequence[prefill.Ids], **shape: Any) -> Any:
        passes.append(len(prompts))
        return read(model, prompts, **shape)

    await engine.sampler.sample(request("hi", deterministic=True))  # tries the shape of the pass
    monkeypatch.setattr(prompt_cache, "read_prompts", counted)
    rows = [
        request(f"{slot}?", slot=slot, sample=i, deterministic=True, max_new_tokens=2)
        for slot in range(3)
        for i in range(20)
    ]
    assert len(rows) > FIXED_ROWS
    await together(engine, rows)
    assert passes == [3]
