"""The contract that `trainer.sampler.vllm` keeps over a vLLM server; bound to the fake and to real
vLLM."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
import torch

from schemas.errors import CorruptData, FailureCategory, Refused, UserCodeError
from schemas.models.constraints import Constraint
from schemas.sampling import Message, ModelRef, PolicyRef, SampleRequest, Turn, sequences_of
from tests.unit.trainer.sampler.test_constraints import ADD, FORMAT, WEIGH
from tests.unit.trainer.support import TINY, Shelf, request
from trainer.engine import Engine
from trainer.forward.packing import Example, pack
from trainer.model.lora import fresh_adapter, target_modules
from trainer.model.lora_names import B_SUFFIX, Scaling
from trainer.objective.batch import with_masks
from trainer.policy import Policy, export
from trainer.sampler.vllm import engine as vllm_engine
from trainer.sampler.vllm import fleet
from trainer.sampler.vllm.client import VllmServer
from trainer.sampler.vllm.engine import VllmSampler
from trainer.sampler.vllm.fleet import VllmServers
from trainer.sampler.vllm.whole_weights import replace_weights

CLOSE = 1e-5
"""Between a server's logprobs and the learner's, in fp32; the largest of all tokens."""


@dataclass
class World:
    """An engine that samples on these servers, and the adapters that it may be asked for."""

    engine: Engine
    shelf: Shelf
    urls: tuple[str, ...]
    folder: Path
    model: ModelRef = TINY
    trained: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    @property
    def sampler(self) -> VllmSampler:
        assert isinstance(self.engine.sampler, VllmSampler)
        return self.engine.sampler

    def ask(self, text: str = "hello", **given: Any) -> SampleRequest:
        """A request for a completion of this model."""
        return request(text, **{"model": self.model, **given})

    async def policy(self, version: int, *, rank: int = 4) -> PolicyRef:
        """An adapter that moves the policy far from the base."""
        loaded = await self.sampler._cache.load_model(self.model)
        modules = target_modules(loaded.base, "all-linear")
        tensors = fresh_adapter(loaded.base, modules, rank=rank, seed=version)
        draws = torch.Generator().manual_seed(version)
        for name in [name for name in tensors if name.endswith(B_SUFFIX)]:
            tensors[name] = 0.3 * torch.randn(tensors[name].shape, generator=draws)
        ref = self.shelf.put(export(tensors))
        self.trained[ref.sha256] = tensors
        return PolicyRef(version=version, weights=ref)

    async def full_policy(self, version: int) -> PolicyRef:
        """All weights of a model, far from those of the base."""
        loaded = await self.sampler._cache.load_model(self.model)
        draws = torch.Generator().manual_seed(version)
        tensors = {}
        for name, weight in loaded.base.model.named_parameters():
            noise = torch.randn(weight.shape, generator=draws)
            tensors[name] = weight.detach() * (1 + 0.3 * noise)
        ref = self.shelf.put(export(tensors))
        self.trained[ref.sha256] = tensors
        return PolicyRef(version=version, weights=ref)

    def ask_full(self, text: str, policy: PolicyRef, **given: Any) -> SampleRequest:
        """A request of a run with full tuning."""
        return self.ask(text, policy=policy, **given).model_copy(update={"tuning": "full"})

    async def learner(
        self, asked: SampleRequest, turn: Turn, *, has_masks: bool = True
    ) -> list[float]:
        """The learner's logprobs of the tokens of a turn, under the masks of a forced one."""
        loaded = await self.sampler._cache.load_model(asked.model)
        weights = asked.policy.weights
        scaling = Scaling(asked.lora_alpha, asked.lora_scaling)
        policy = Policy(loaded, self.trained[weights.sha256] if weights else {}, scaling)
        if not has_masks:
            turn = turn.model_copy(update={"grammar": None})
        (sequence,) = sequences_of((turn,))
        examples = with_masks([Example(0, sequence)], policy)
        (micro,) = pack(examples, micro_batch_tokens=512, share=False)
        with torch.no_grad():
            found, _ = policy.logprobs(micro, temperature=asked.params.temperature)
        return [float(x) for x in found]

    async def served(self, url: str) -> set[str]:
        """The adapters that a server lists."""
        async with httpx.AsyncClient() as http:
            models = (await http.get(f"{url}/v1/models")).json()["data"]
        return {model["id"] for model in models if model["parent"]}

    async def told(self, url: str, path: str, **body: Any) -> None:
        """Send a server a request from another client."""
        async with httpx.AsyncClient() as http:
            (await http.post(f"{url}{path}", json=body)).raise_for_status()


@asynccontextmanager
async def sampling_on(
    urls: tuple[str, ...], folder: Path, *, model: ModelRef = TINY, patience_s: float = 10.0
) -> AsyncIterator[World]:
    """A world over these servers, which removes its adapters from them at the end."""
    shelf = Shelf()
    servers = VllmServers(urls, folder, patience_s=patience_s)
    engine = Engine(fetch=shelf.fetch, threads=1, vllm=servers)
    try:
        yield World(engine, shelf, urls, folder, model)
    finally:
        await engine.aclose()


class VllmSuite:
    """Bind with a fixture `urls`: servers of `model` with 128 positions and adapters up to rank 16."""

    model = TINY

    @pytest.fixture
    def urls(self) -> tuple[str, ...]:
        raise NotImplementedError

    @pytest.fixture
    async def world(self, urls: tuple[str, ...], tmp_path: Path) -> AsyncIterator[World]:
        async with sampling_on(urls, tmp_path / "adapters", model=self.model) as world:
            yield world

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    async def test_the_learner_finds_the_logprobs_that_were_sampled_with(
        self, world: World, temperature: float
    ) -> None:
        policies = [PolicyRef(version=0), await world.policy(1), await world.policy(2)]
        requests = [
            world.ask(f"count {i}", policy=p, sample=i, temperature=temperature, max_new_tokens=24)
            for p in policies
            for i in range(3)
        ]
        turns = await asyncio.gather(*(world.sampler.sample(r) for r in requests))
        for asked, turn in zip(requests, turns, strict=True):
            learner = await world.learner(asked, turn)
            assert turn.logprobs == pytest.approx(learner, abs=CLOSE)
        assert len({turn.completion_ids for turn in turns}) > len(policies)

    async def test_a_rank_stabilized_adapter_is_served_with_its_own_scaling(
        self, world: World
    ) -> None:
        """The same tensors scaled by alpha / rank are another version, so they have another name."""
        plain = world.ask(policy=await world.policy(1), max_new_tokens=24)
        asked = plain.model_copy(update={"lora_scaling": "rank_stabilized"})
        turn = await world.sampler.sample(asked)
        learner, other = await world.learner(asked, turn), await world.learner(plain, turn)
        assert turn.logprobs == pytest.approx(learner, abs=CLOSE)
        assert max(abs(a - b) for a, b in zip(learner, other, strict=True)) > 0.1
        for url in world.urls:
            assert all(name.endswith("-rs") for name in await world.served(url))

    async def test_a_sample_is_a_function_of_its_place_in_the_run(self, world: World) -> None:
        policy = await world.policy(1)
        asked = world.ask(policy=policy, max_new_tokens=20)
        once = await world.sampler.sample(asked)
        again = await world.sampler.sample(asked)
        other = await world.sampler.sample(world.ask(policy=policy, max_new_tokens=20, sample=1))
        assert again.completion_ids == once.completion_ids
        assert again.logprobs == pytest.approx(once.logprobs, abs=CLOSE)
        assert other.completion_ids != once.completion_ids

    async def test_greedy_is_greedy(self, world: World) -> None:
        asked = world.ask(policy=await world.policy(1), temperature=0, max_new_tokens=16)
        turns = [await world.sampler.sample(asked) for _ in range(2)]
        assert turns[0].completion_ids == turns[1].completion_ids
        assert turns[0].logprobs == pytest.approx(turns[1].logprobs, abs=CLOSE)

    async def test_a_conversation_goes_on_from_the_ids_that_were_sampled(
        self, world: World
    ) -> None:
        asked = world.ask("first", policy=await world.policy(3), max_new_tokens=12)
        one = await world.sampler.sample(asked)
        reply = Message(role="assistant", content=one.text)
        more = (*asked.messages, reply, Message(role="user", content="go on"))
        going_on = asked.model_copy(
            update={"messages": more, "history": (one,), "history_messages": asked.messages}
        )
        two = await world.sampler.sample(going_on)
        said = (*one.prompt_ids, *one.completion_ids)
        assert two.prompt_ids[: len(said)] == said
        (row,) = sequences_of((one, two))
        assert sum(row.loss_mask) == len(one.completion_ids) + len(two.completion_ids)
        learner = await world.learner(going_on, two)
        assert two.logprobs == pytest.approx(learner[-len(two.logprobs) :], abs=CLOSE)

    async def test_a_stop_string_ends_the_completion_and_is_cut_from_the_text(
        self, world: World
    ) -> None:
        policy = await world.policy(1)
        free = await world.sampler.sample(world.ask(policy=policy, max_new_tokens=24))
        stop = free.text[3:5]
        assert len(stop) == 2
        ask = world.ask(policy=policy, max_new_tokens=24, stop=(stop,))
        turn = await world.sampler.sample(ask.model_copy(update={"pieces": True}))
        assert turn.finish_reason == "stop"
        assert turn.text == free.text[: free.text.find(stop)]
        assert turn.completion_ids == free.completion_ids[: len(turn.completion_ids)]
        shown = b"".join(bytes(piece) for piece in turn.pieces or () if piece is not None)
        assert shown.decode(errors="replace").startswith(turn.text)

    async def test_a_prompt_that_is_too_long_is_refused_and_a_completion_is_cut(
        self, world: World
    ) -> None:
        with pytest.raises(UserCodeError, match="at most 127 fit") as raised:
            await world.sampler.sample(world.ask("x" * 200))
        assert raised.value.category == FailureCategory.PROMPT_TOO_LONG
        turn = await world.sampler.sample(world.ask("x" * 100, max_new_tokens=100))
        assert len(turn.prompt_ids) + len(turn.completion_ids) <= 128

    async def test_versions_have_names_of_their_own_and_old_ones_are_unloaded(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fleet, "KEPT", 2)
        policies = [await world.policy(version) for version in (1, 2, 3)]
        first = world.ask(policy=policies[0])
        once = await world.sampler.sample(first)
        for policy in policies[1:]:
            await world.sampler.sample(world.ask(policy=policy))
        names = {f"headrace-{p.weights.sha256}-a8" for p in policies[1:] if p.weights}
        for url in world.urls:
            assert await world.served(url) == names
        assert {path.name for path in world.folder.iterdir()} == names
        assert (await world.sampler.sample(first)).completion_ids == once.completion_ids
        await world.sampler.aclose()
        for url in world.urls:
            assert await world.served(url) == set()

    async def test_a_version_that_somebody_unloaded_is_loaded_again(self, world: World) -> None:
        policy = await world.policy(1)
        asked = world.ask(policy=policy)
        once = await world.sampler.sample(asked)
        for url in world.urls:
            for name in await world.served(url):
                await world.told(url, "/v1/unload_lora_adapter", lora_name=name)
        assert (await world.sampler.sample(asked)).completion_ids == once.completion_ids

    async def test_a_rank_that_the_server_cannot_serve_is_refused(self, world: World) -> None:
        with pytest.raises(Refused, match=r"--max-lora-rank .* lower advanced\.lora_rank"):
            await world.sampler.sample(world.ask(policy=await world.policy(1, rank=32)))
        for url in world.urls:
            assert await world.served(url) == set()

    async def test_a_server_of_another_base_model_is_refused(self, world: World) -> None:
        other = self.model.model_copy(update={"seed": self.model.seed + 1})
        with pytest.raises(Refused, match=r"serves another model.*experiment\.model_path"):
            await world.sampler.sample(world.ask(model=other))
        await world.sampler.sample(world.ask())

    @pytest.mark.parametrize("damage", ["zero", "other"])
    async def test_a_server_that_has_something_else_is_fenced(
        self, world: World, monkeypatch: pytest.MonkeyPatch, damage: str
    ) -> None:
        """Twin: with the adapter as it was exported, the same server samples."""
        policy = await world.policy(1)
        write = fleet._write_atomically

        def damaged(path: Path, data: bytes) -> None:
            if path.suffix == ".safetensors":
                assert policy.weights is not None
                assert hashlib.sha256(data).hexdigest() == policy.weights.sha256
                tensors = world.trained[policy.weights.sha256]
                changed = {
                    name: tensor * (0.0 if damage == "zero" else 1.02)
                    for name, tensor in tensors.items()
                }
                data = export(changed)
            write(path, data)

        with monkeypatch.context() as patched:
            patched.setattr(fleet, "_write_atomically", damaged)
            with pytest.raises(CorruptData, match="every sampler is fenced"):
                await world.sampler.sample(world.ask(policy=policy))
        assert len(world.sampler.fleet.warnings) == len(world.urls)
        async with sampling_on(world.urls, world.folder, model=world.model) as healthy:
            again = await healthy.policy(1)
            await healthy.sampler.sample(healthy.ask(policy=again))

    async def test_requests_that_vllm_cannot_serve_are_refused(self, world: World) -> None:
        policy = await world.policy(1)
        with pytest.raises(Refused, match="HEADRACE_SAMPLER=torch"):
            await world.sampler.sample(world.ask(policy=policy, deterministic=True))
        with pytest.raises(Refused, match="rollout_top_p must be 1"):
            await world.sampler.sample(world.ask(policy=policy, top_p=0.9))
        forced = {"constraint": Constraint(json_schema="{}")}
        with pytest.raises(UserCodeError, match="llguidance does not read its tokenizer"):
            await world.sampler.sample(world.ask(policy=policy).model_copy(update=forced))
        with pytest.raises(Refused, match="rank 1 to 512"):
            await world.sampler.sample(world.ask(policy=await world.policy(2, rank=520)))


class FullSuite:
    """Bind with a fixture `urls`: servers of `model` with 128 positions, whose weights can be
    replaced."""

    model = TINY

    @pytest.fixture
    async def world(self, urls: tuple[str, ...], tmp_path: Path) -> AsyncIterator[World]:
        async with sampling_on(urls, tmp_path / "adapters", model=self.model) as world:
            yield world

    async def test_the_learner_finds_the_logprobs_of_each_version(self, world: World) -> None:
        """Requests for versions, an adapter and the base model at once, which take turns."""
        full = [await world.full_policy(version) for version in (1, 2)]
        requests = [
            world.ask_full(f"count {i}", policy, sample=i, max_new_tokens=16)
            for i in range(3)
            for policy in full
        ]
        requests.insert(2, world.ask("base", policy=PolicyRef(version=0), max_new_tokens=16))
        requests.insert(4, world.ask("lora", policy=await world.policy(3), max_new_tokens=16))
        turns = await asyncio.gather(*(world.sampler.sample(asked) for asked in requests))
        for asked, turn in zip(requests, turns, strict=True):
            learner = await world.learner(asked, turn)
            assert turn.logprobs == pytest.approx(learner, abs=CLOSE)
        assert not world.sampler.fleet.warnings

    async def test_a_version_is_read_from_a_file_that_is_removed(self, world: World) -> None:
        asked = world.ask_full("hi", await world.full_policy(1), max_new_tokens=4)
        await world.sampler.sample(asked)
        assert not [path for path in world.folder.rglob("*") if path.suffix == ".safetensors"]

    async def test_twin_a_server_that_gets_no_new_weights_is_found_out(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It says that it has them. Version 1 is sampled before, so it holds other trained weights."""
        await world.sampler.sample(world.ask_full("hi", await world.full_policy(1)))
        asked = world.ask_full("hi", await world.full_policy(2))

        async def ignore(server: VllmServer, path: str) -> None:
            pass

        with monkeypatch.context() as patched:
            patched.setattr(VllmServer, "reload_weights", ignore)
            with pytest.raises(
                CorruptData, match=r"every sampler is fenced: .*differ from the lea"
            ):
                await world.sampler.sample(asked)
        await world.engine.aclose()
        async with sampling_on(world.urls, world.folder, model=world.model) as healthy:
            again = healthy.ask_full("hi", await healthy.full_policy(2), max_new_tokens=16)
            turn = await healthy.sampler.sample(again)
            assert turn.logprobs == pytest.approx(await healthy.learner(again, turn), abs=CLOSE)

    async def test_a_worker_that_starts_again_uses_the_weights_that_are_there(
        self, world: World
    ) -> None:
        """As after kill -9, if the canary finds them right. Weights that a killed worker had begun to
        replace are replaced."""
        asked = world.ask_full("hi", await world.full_policy(1), max_new_tokens=16)
        calm = await world.sampler.sample(asked)
        await world.engine.aclose()
        before = await labels(world.urls)
        for is_replaced in (False, True):
            for url in world.urls if is_replaced else ():
                await world.told(url, "/update_weight_version", new_version="unchecked.1")
            async with sampling_on(world.urls, world.folder, model=world.model) as again:
                await again.full_policy(1)
                turn = await again.sampler.sample(asked)
                assert turn.completion_ids == calm.completion_ids
                assert turn.logprobs == pytest.approx(calm.logprobs, abs=CLOSE)
            assert (await labels(world.urls) != before) == is_replaced

    async def test_an_answer_from_replaced_weights_is_dropped(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody else replaces the weights after the canary. Twin: without the check the answer is
        used, and the learner finds other logprobs."""
        policy = await world.full_policy(1)
        await world.sampler.sample(world.ask_full("hi", policy, max_new_tokens=4))
        asked = world.ask_full("ho", policy, max_new_tokens=16)
        for is_checked in (True, False):
            for replica in world.sampler.fleet.replicas:
                assert replica.card is not None
                await replace_weights(replica.server, replica.card.root)
            with monkeypatch.context() as patched:
                if not is_checked:
                    patched.setattr(vllm_engine, "confirm_weights", AsyncMock())
                turn = await world.sampler.sample(asked)
            learner = await world.learner(asked, turn)
            assert (turn.logprobs == pytest.approx(learner, abs=CLOSE)) == is_checked


async def labels(urls: tuple[str, ...]) -> dict[str, str]:
    """The label of the weights of each server."""
    async with httpx.AsyncClient() as http:
        return {
            url: (await http.get(f"{url}/weight_info")).json()["weight_version"] for url in urls
        }


PROPERTIES = ["color", "number"]
ONE_OF_TWO = Constraint(json_schema='{"enum": ["red", "green"]}')


class ForcedSuite:
    """Bind with a fixture `world`: a server with 512 positions, of a model that `readable_model`
    made."""

    def force(
        self, world: World, constraint: Constraint = FORMAT, *, tools: Any = (), **given: Any
    ) -> SampleRequest:
        asked = world.ask(**{"max_new_tokens": 80, **given})
        return asked.model_copy(update={"constraint": constraint, "tools": tools})

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    async def test_a_forced_answer_has_the_learners_logprobs_under_its_masks(
        self, world: World, temperature: float
    ) -> None:
        """Twin: over the whole vocabulary the learner's are others."""
        policy = await world.policy(1)
        requests = [
            self.force(world, policy=policy, sample=n, temperature=temperature) for n in range(4)
        ]
        turns = await asyncio.gather(*(world.sampler.sample(one) for one in requests))
        for asked, turn in zip(requests, turns, strict=True):
            assert sorted(json.loads(turn.text)) == PROPERTIES
            assert turn.finish_reason == "stop"
            assert turn.grammar is not None
            assert turn.grammar.vocabulary == "vllm"
            learner = await world.learner(asked, turn)
            assert turn.logprobs == pytest.approx(learner, abs=CLOSE)
            assert sum(logprob == 0 for logprob in turn.logprobs) > 10
            free = await world.learner(asked, turn, has_masks=False)
            pairs = zip(turn.logprobs, free, strict=True)
            assert sum(abs(a - b) for a, b in pairs) / len(free) > 1
        assert len({turn.text for turn in turns}) > 1

    async def test_a_greedy_forced_answer_is_the_same_each_time(self, world: World) -> None:
        asked = self.force(world, ONE_OF_TWO, policy=await world.policy(1), temperature=0)
        turns = [await world.sampler.sample(asked) for _ in range(2)]
        assert turns[0].completion_ids == turns[1].completion_ids
        assert json.loads(turns[0].text) in ("red", "green")

    async def test_top_p_may_cut_allowed_tokens_off_where_nothing_is_trained(
        self, world: World
    ) -> None:
        asked = self.force(world, ONE_OF_TWO, policy=await world.policy(1), top_p=0.3)
        key = asked.key.model_copy(update={"purpose": "eval"})
        turn = await world.sampler.sample(asked.model_copy(update={"key": key}))
        assert json.loads(turn.text) in ("red", "green")

    async def test_a_forced_call_is_read_as_a_call(self, world: World) -> None:
        policy, either = await world.policy(1), Constraint(calls=("add", "weigh"))
        asked = [
            self.force(world, either, tools=(ADD, WEIGH), policy=policy, sample=n) for n in range(6)
        ]
        turns = await asyncio.gather(*(world.sampler.sample(one) for one in asked))
        calls = [turn.message.tool_calls for turn in turns]
        assert {one.name for (one,) in calls} <= {"add", "weigh"}
        for (call,) in calls:
            found = json.loads(call.arguments)
            assert sorted(found) == (PROPERTIES if call.name == "add" else [])

    async def test_a_stream_tells_a_forced_answer(self, world: World) -> None:
        asked = self.force(world, policy=await world.policy(1))
        pieces: list[str] = []
        turn = await world.sampler.stream(asked, pieces.append)
        assert len(pieces) > 3
        assert "".join(pieces) == turn.text
        whole = await world.sampler.sample(asked)
        assert whole.completion_ids == turn.completion_ids
        assert whole.grammar == turn.grammar

    async def test_a_forced_answer_that_was_cut_off_keeps_its_masks(self, world: World) -> None:
        asked = self.force(world, policy=await world.policy(1), max_new_tokens=7)
        turn = await world.sampler.sample(asked)
        assert (turn.finish_reason, turn.text) == ("length", '{"color')
        assert await world.learner(asked, turn) == [0.0] * 7 == list(turn.logprobs)

    async def test_the_likeliest_tokens_are_those_that_are_allowed(self, world: World) -> None:
        asked = self.force(world, policy=await world.policy(1))
        turn = await world.sampler.sample(asked.model_copy(update={"likeliest": 5, "pieces": True}))
        assert turn.likeliest is not None
        assert [len(one) for one in turn.likeliest[:3]] == [1, 1, 1]

    async def test_a_schema_that_allows_nothing_is_refused_and_the_next_one_works(
        self, world: World
    ) -> None:
        policy = await world.policy(1)
        with pytest.raises(UserCodeError, match="anyOf is empty; simplify"):
            await world.sampler.sample(
                self.force(world, Constraint(json_schema='{"enum": []}'), policy=policy)
            )
        await world.sampler.sample(self.force(world, policy=policy))
