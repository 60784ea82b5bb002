"""The vLLM sampler over servers that speak like vLLM: the tests that real servers run too, and the
faults that only a fake can be made to show."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

from consumers.deploy.loading import DeployPorts, load_model
from infra.settings.settings import Settings
from schemas.deployments import ServedModel
from schemas.effects import LoadModel
from schemas.errors import CorruptData, Refused, TransientError, UserCodeError
from schemas.models.constraints import Constraint
from schemas.sampling import ModelRef, PolicyRef, Turn
from tests.contracts.vllm_suite import ForcedSuite, FullSuite, VllmSuite, World, sampling_on
from tests.kit.fakes import bench
from tests.kit.tokenizers import readable_model
from tests.kit.vllm import FakeVllm, fake_vllms, num_sampled
from tests.unit.trainer.support import TINY, job, request
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import build_base
from trainer.sampler.vllm import engine as vllm_engine
from trainer.sampler.vllm import fleet, server_state, whole_weights
from trainer.sampler.vllm.client import CompletionRequest, ServerCard, ServerGone, VllmServer
from trainer.sampler.vllm.engine import affinity_of
from trainer.sampler.vllm.server_state import Replica
from trainer.sampler.vllm.whole_weights import OtherWeights

pytestmark = [
    pytest.mark.torch,
    # The fakes share a base, which gets peft's layers once for each scaling.
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),
]


@pytest.fixture(scope="module")
def base() -> Fallback:
    return Fallback(build_base(TINY, {}, device=torch.device("cpu")))


@pytest.fixture
async def fakes(base: Fallback) -> AsyncIterator[tuple[FakeVllm, FakeVllm]]:
    two = (FakeVllm(base), FakeVllm(base))
    async with fake_vllms(*two):
        yield two


class TestFake(VllmSuite):
    @pytest.fixture
    async def urls(self, base: Fallback) -> AsyncIterator[tuple[str, ...]]:
        async with fake_vllms(FakeVllm(base)) as urls:
            yield urls


def without_server(turn: Turn) -> Turn:
    """The turn without the server that sampled it, whose noise each worker measures for itself."""
    return turn.model_copy(update={"server": None})


class TestFull(FullSuite):
    @pytest.fixture
    async def fakes(self, base: Fallback) -> AsyncIterator[tuple[FakeVllm, FakeVllm]]:
        two = (FakeVllm(base, dev_mode=True), FakeVllm(base, dev_mode=True))
        async with fake_vllms(*two):
            yield two

    @pytest.fixture
    def urls(self, fakes: tuple[FakeVllm, FakeVllm]) -> tuple[str, ...]:
        return tuple(fake.url for fake in fakes)

    async def test_versions_are_replaced_once_for_all_their_requests(
        self, world: World, fakes: tuple[FakeVllm, FakeVllm]
    ) -> None:
        """The base model, which the noise is measured with, is there already."""
        policies = [await world.full_policy(version) for version in (1, 2)]
        asked = [
            world.ask_full("hi", policy, sample=i, slot=i, max_new_tokens=4)
            for i in range(6)
            for policy in policies
        ]
        await asyncio.gather(*(world.sampler.sample(one) for one in asked))
        hashes = [policy.weights.sha256 for policy in policies if policy.weights]
        for fake in fakes:
            assert [Path(path).name for path in fake.reloads] == hashes

    async def test_a_server_that_comes_back_gets_the_weights_before_it_samples(
        self,
        world: World,
        fakes: tuple[FakeVllm, FakeVllm],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It died in the middle of answers, and was back at once."""
        monkeypatch.setattr(server_state, "BACK_S", 0.01)
        policy = await world.full_policy(1)
        requests = [
            world.ask_full("hi", policy, slot=slot, max_new_tokens=8) for slot in spread(fakes)
        ]
        calm = await asyncio.gather(*(world.sampler.sample(asked) for asked in requests))
        victim = fakes[0]
        victim.hold, before = asyncio.Event(), num_sampled(victim)
        tasks = [asyncio.create_task(world.sampler.sample(asked)) for asked in requests]
        await eventually(lambda: num_sampled(victim) > before)
        await victim.die()
        victim.hold = None
        await victim.start()
        again = await asyncio.gather(*tasks)
        later = await asyncio.gather(*(world.sampler.sample(asked) for asked in requests))
        for turns in (again, later):
            assert [turn.completion_ids for turn in turns] == [t.completion_ids for t in calm]
        assert len(victim.reloads) == 2

    async def test_twin_a_prefix_cache_that_is_kept_is_found_out(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await world.sampler.sample(world.ask_full("hi", await world.full_policy(1)))
        monkeypatch.setattr(VllmServer, "reset_prefix_cache", AsyncMock())
        with pytest.raises(CorruptData, match="every sampler is fenced"):
            await world.sampler.sample(world.ask_full("hi", await world.full_policy(2)))

    async def test_another_worker_waits_until_the_weights_are_given_back(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It samples the version that the servers have, and replaces it once nobody asked for it for
        a while."""
        asked = world.ask_full("hi", await world.full_policy(1), max_new_tokens=4)
        calm = await world.sampler.sample(asked)
        async with sampling_on(world.urls, world.folder, patience_s=0.2) as other:
            await other.full_policy(1)
            assert without_server(await other.sampler.sample(asked)) == without_server(calm)
            other_asked = other.ask_full("hi", await other.full_policy(2), max_new_tokens=4)
            with pytest.raises(OtherWeights, match="servers of their own, or wait"):
                await other.sampler.sample(other_asked)
            with monkeypatch.context() as patched:
                replaced = AsyncMock(side_effect=OtherWeights("replaced"))
                patched.setattr(vllm_engine, "confirm_weights", replaced)
                with pytest.raises(OtherWeights, match="6 tries to sample failed"):
                    await other.sampler.sample(asked)
            before = world.sampler.fleet._giving_back
            assert await world.sampler.sample(asked) == calm
            assert before is not None
            assert before.cancelled(), "it was asked for a sample since"
            monkeypatch.setattr(fleet, "IDLE_S", 0.0)
            assert await world.sampler.sample(asked) == calm
            await eventually(lambda: not world.sampler.fleet._whole.is_owner)
            turn = await other.sampler.sample(other_asked)
            learner = await other.learner(other_asked, turn)
            assert turn.logprobs == pytest.approx(learner, abs=1e-5)

    async def test_a_base_that_another_worker_replaces_while_it_is_measured_is_not_refused(
        self, world: World, fakes: tuple[FakeVllm, FakeVllm], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server was new, so its weights looked like those of another model, for good."""
        policy = await world.full_policy(1)
        assert policy.weights is not None
        other, complete = world.trained[policy.weights.sha256], VllmServer.complete
        replaced = list[str]()

        async def replace_before(server: VllmServer, *given: Any) -> Any:
            if server.url not in replaced:
                replaced.append(server.url)
                await server.set_weight_label("unchecked.1")
                for fake in fakes:
                    fake.weights = other
            return await complete(server, *given)

        monkeypatch.setattr(VllmServer, "complete", replace_before)
        asked = world.ask("hi", max_new_tokens=16)
        turn = await world.sampler.sample(asked)
        assert sorted(replaced) == sorted(world.urls)
        assert turn.logprobs == pytest.approx(await world.learner(asked, turn), abs=1e-5)

    async def test_a_server_that_was_restarted_without_new_weights_is_named(
        self,
        world: World,
        fakes: tuple[FakeVllm, FakeVllm],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """LoRA runs go on there."""
        monkeypatch.setattr(server_state, "BACK_S", 0.01)
        asked = world.ask_full("hi", await world.full_policy(1))
        await world.sampler.sample(asked)
        for fake in fakes:
            await fake.die()
            fake.dev_mode = False
            await fake.start()
        lora = world.ask("hi", policy=await world.policy(1), max_new_tokens=4)
        assert await world.sampler.sample(lora)
        with pytest.raises(Refused, match="VLLM_SERVER_DEV_MODE=1"):
            await world.sampler.sample(asked)

    async def test_a_version_whose_request_was_cancelled_is_not_loaded_for_the_next(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A run was stopped while servers read its version. The file is removed at once."""
        stopped, loading = world.ask_full("hi", await world.full_policy(1)), asyncio.Event()

        async def hang(server: VllmServer, path: str) -> None:
            loading.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patched:
            patched.setattr(VllmServer, "reload_weights", hang)
            task = asyncio.create_task(world.sampler.sample(stopped))
            await loading.wait()
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled()
        assert not list(world.folder.rglob("*.safetensors"))
        asked = world.ask_full("hi", await world.full_policy(2), max_new_tokens=16)
        turn = await world.sampler.sample(asked)
        assert turn.logprobs == pytest.approx(await world.learner(asked, turn), abs=1e-5)

    async def test_a_server_that_does_not_see_the_file_is_refused(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(whole_weights, "MODEL_NAME", "elsewhere")
        with pytest.raises(Refused, match=r"cannot load the weights .* HEADRACE_VLLM_ADAPTERS"):
            await world.sampler.sample(world.ask_full("hi", await world.full_policy(1)))

    async def test_weights_that_are_not_those_of_the_log_are_refused(
        self, world: World, fakes: tuple[FakeVllm, FakeVllm]
    ) -> None:
        policy = await world.full_policy(1)
        tensors = await world.sampler._cache.load_tensors(policy)
        next(iter(tensors.values())).add_(1)
        with pytest.raises(CorruptData, match="do not have the recorded hash"):
            await world.sampler.sample(world.ask_full("hi", policy))
        assert not any(fake.reloads for fake in fakes)


async def test_a_server_whose_weights_are_fixed_refuses_full_tuning(world: World) -> None:
    asked = world.ask_full("hi", await world.full_policy(1))
    with pytest.raises(Refused, match="VLLM_SERVER_DEV_MODE=1"):
        await world.sampler.sample(asked)


@pytest.fixture(scope="module")
def readable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fallback, ModelRef]:
    """A model that llguidance reads, and where it is."""
    base = build_base(TINY, {}, device=torch.device("cpu"))
    model = readable_model(base, tmp_path_factory.mktemp("readable"))
    return Fallback(base), model


class TestForced(ForcedSuite):
    @pytest.fixture
    async def fake(self, readable: tuple[Fallback, ModelRef]) -> AsyncIterator[FakeVllm]:
        fake = FakeVllm(readable[0], max_model_len=512)
        async with fake_vllms(fake):
            yield fake

    @pytest.fixture
    async def world(
        self, fake: FakeVllm, readable: tuple[Fallback, ModelRef], tmp_path: Path
    ) -> AsyncIterator[World]:
        async with sampling_on((fake.url,), tmp_path, model=readable[1]) as world:
            yield world

    async def test_a_server_that_ignores_the_grammar_is_found_out(
        self, world: World, fake: FakeVllm
    ) -> None:
        """As one that has a reasoning parser, or is too old. The next answer of a good one is used."""
        asked, fake.masks = self.force(world, policy=await world.policy(1)), "none"
        with pytest.raises(UserCodeError, match=r"other token masks .* it allows token \d+, which"):
            await world.sampler.sample(asked)
        fake.masks = "vllm"
        assert (await world.sampler.sample(asked)).finish_reason == "stop"

    @pytest.mark.parametrize(
        ("schema", "text", "how"),
        [
            ({"enum": ["red", "green"]}, "g", "it allows 1 tokens where at least 2 are allowed"),
            ({"type": "string", "maxLength": 30}, "e", "logprobs differ from the learner's"),
        ],
    )
    async def test_a_server_that_forbids_more_is_found_out(
        self, world: World, fake: FakeVllm, schema: dict[str, Any], text: str, how: str
    ) -> None:
        """Where few tokens are allowed by counting them, and else by the logprobs of the first answer.
        Twin: a server that forbids nothing more is used."""
        policy = await world.policy(1)
        asked = self.force(world, Constraint(json_schema=json.dumps(schema)), policy=policy)
        tokenizer = fake.base.tokenizer
        fake.forbids, fake.masks = tokenizer.encode(text)[0], "narrow"
        with pytest.raises(UserCodeError, match=how):
            await world.sampler.sample(asked)
        fake.masks = "vllm"
        await world.sampler.sample(asked)

    async def test_a_grammar_that_the_server_refuses_fails_the_answer(
        self, world: World, fake: FakeVllm
    ) -> None:
        asked, fake.masks = self.force(world, policy=await world.policy(1)), "refused"
        told: list[str] = []
        for sampling in (world.sampler.sample(asked), world.sampler.stream(asked, told.append)):
            with pytest.raises(UserCodeError, match="cannot force this answer: Invalid grammar"):
                await sampling
        assert told == []


@pytest.fixture
async def world(fakes: tuple[FakeVllm, FakeVllm], tmp_path: Path) -> AsyncIterator[World]:
    async with sampling_on(tuple(fake.url for fake in fakes), tmp_path) as world:
        yield world


async def test_a_server_is_given_the_ids_of_a_dated_prompt(
    world: World, fakes: tuple[FakeVllm, FakeVllm]
) -> None:
    """The date on the server does not matter, because the server renders nothing."""
    loaded = await world.sampler._cache.load_model(world.model)
    tokenizer = loaded.base.tokenizer
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"
    for day, says in (("2026-11-22", "22 Nov 2026"), ("2031-01-02", "02 Jan 2031")):
        turn = await world.sampler.sample(world.ask("hi", date=day))
        assert tokenizer.decode(list(turn.prompt_ids)) == f"{says}hi"
        asked = [ask for fake in fakes for ask in fake.asked]
        assert list(turn.prompt_ids) in [ask["prompt"] for ask in asked]
        assert all(isinstance(ask["prompt"], list) for ask in asked)


async def eventually(reached: Callable[[], bool]) -> None:
    """Let all pending work continue until this condition holds."""
    async with asyncio.timeout(60):
        while not reached():
            await asyncio.sleep(0.005)


def spread(fakes: tuple[FakeVllm, FakeVllm]) -> list[int]:
    """Slots of groups, two for each server; the server of a group depends on the ports."""
    groups: dict[str, list[int]] = {fake.url: [] for fake in fakes}
    for slot in range(64):
        weight = partial(fleet._rendezvous_weight, affinity=affinity_of(request(slot=slot).key))
        groups[max(groups, key=weight)].append(slot)
    return [slot for slots in groups.values() for slot in slots[:2]]


async def test_a_version_is_on_every_server_and_a_group_on_one(
    world: World, fakes: tuple[FakeVllm, FakeVllm]
) -> None:
    policy = await world.policy(1)
    groups = [
        [request(max_new_tokens=4, slot=slot, sample=i, policy=policy) for i in range(3)]
        for slot in spread(fakes)
    ]
    for group in groups:
        before = [num_sampled(fake) for fake in fakes]
        await asyncio.gather(*(world.sampler.sample(r) for r in group))
        assert sorted(num_sampled(f) - n for f, n in zip(fakes, before, strict=True)) == [0, 3]
    assert all(len(fake.loads) == 1 for fake in fakes)
    assert all(num_sampled(fake) for fake in fakes)


async def test_a_version_that_one_server_refuses_is_on_none(
    world: World, fakes: tuple[FakeVllm, FakeVllm]
) -> None:
    fakes[1].max_lora_rank = 2
    with pytest.raises(Refused, match="max-lora-rank"):
        await world.sampler.sample(request(policy=await world.policy(1)))
    assert not any(fake.adapters for fake in fakes)
    assert not any(num_sampled(fake) for fake in fakes)


async def test_samples_of_a_server_that_dies_are_sampled_again_elsewhere(
    world: World, fakes: tuple[FakeVllm, FakeVllm]
) -> None:
    """The ids are the same, because the seed belongs to the sample."""
    policy = await world.policy(1)
    requests = [request(slot=2, sample=i, policy=policy, max_new_tokens=16) for i in range(4)]
    calm = [await world.sampler.sample(r) for r in requests]
    victim = max(fakes, key=num_sampled)
    other = next(fake for fake in fakes if fake is not victim)
    victim.hold, asked = asyncio.Event(), num_sampled(victim)
    tasks = [asyncio.create_task(world.sampler.sample(r)) for r in requests]
    await eventually(lambda: num_sampled(victim) == asked + len(requests))
    await victim.die()
    turns = await asyncio.gather(*tasks)
    assert [t.completion_ids for t in turns] == [t.completion_ids for t in calm]
    assert num_sampled(other) == len(requests)


async def test_a_server_to_avoid_is_asked_only_if_there_is_no_other(
    world: World, fakes: tuple[FakeVllm, FakeVllm]
) -> None:
    """The draws stay the same, so the answer does too."""
    asked = request(policy=await world.policy(1), max_new_tokens=8)
    first = await world.sampler.sample(asked)
    assert first.server is not None
    again = asked.model_copy(update={"avoid": (first.server.url,)})
    second = await world.sampler.sample(again)
    assert second.server is not None
    assert {first.server.url, second.server.url} == {fake.url for fake in fakes}
    assert second.completion_ids == first.completion_ids
    both = asked.model_copy(update={"avoid": tuple(fake.url for fake in fakes)})
    assert (await world.sampler.sample(both)).completion_ids == first.completion_ids


async def test_a_stream_has_the_tokens_of_the_whole_answer(
    world: World, fakes: tuple[FakeVllm, FakeVllm]
) -> None:
    """Also when its server breaks off on the way and another one samples the rest."""
    asked = request(policy=await world.policy(1), max_new_tokens=16)
    calm = await world.sampler.sample(asked)
    victim = max(fakes, key=num_sampled)
    for victim.breaks_after in (None, 5):
        pieces: list[str] = []
        found = await world.sampler.stream(asked, pieces.append)
        assert without_server(found) == without_server(calm)
        assert len(pieces) > 1
        assert calm.text.startswith("".join(pieces))
    assert victim.breaks_after is None


@pytest.mark.parametrize("line", ['data: {"error": {"message": "x"}}', "data: no", "data: {}"])
async def test_a_stream_that_is_not_one_of_vllm_is_refused(line: str) -> None:
    server = VllmServer("http://nowhere")
    asked = CompletionRequest(prompt_ids=(1,), max_new_tokens=1, temperature=1.0, seed=0)
    with pytest.raises((Refused, ServerGone), match=r"failed|does not stream like vLLM"):
        server._parse_line(line, asked)
    assert server._parse_line(": comment", asked) == server._parse_line("data: [DONE]", asked)
    with pytest.raises(Refused, match="without token ids"):
        server._parse_line('data: {"choices": [{"token_ids": [1]}]}', asked)
    await server.aclose()


async def test_a_server_that_comes_back_gets_the_version_before_it_samples(
    world: World, fakes: tuple[FakeVllm, FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_state, "BACK_S", 0.01)
    policy = await world.policy(1)
    requests = [request(max_new_tokens=4, slot=slot, policy=policy) for slot in spread(fakes)]
    calm = [await world.sampler.sample(r) for r in requests]
    assert all(num_sampled(fake) for fake in fakes)
    await fakes[0].die()
    for asked, turn in zip(requests, calm, strict=True):
        assert (await world.sampler.sample(asked)).completion_ids == turn.completion_ids
    before = num_sampled(fakes[0])
    await fakes[0].start()
    away, clock = world.sampler.fleet.replicas[0], asyncio.get_running_loop().time
    await eventually(lambda: clock() > away.ask_again_at)
    for asked, turn in zip(requests, calm, strict=True):
        assert (await world.sampler.sample(asked)).completion_ids == turn.completion_ids
    assert num_sampled(fakes[0]) > before
    assert len(fakes[0].loads) == 2


@pytest.mark.parametrize("after", ["write", "load", "card", "complete"])
async def test_a_server_that_a_request_lost_while_a_version_was_loaded_gets_it_again(
    world: World,
    fakes: tuple[FakeVllm, FakeVllm],
    monkeypatch: pytest.MonkeyPatch,
    after: str,
) -> None:
    """Another request noticed that the server was lost, at whatever point the loading was; the
    server was back at once."""
    monkeypatch.setattr(server_state, "BACK_S", 0.01)
    requests = [
        request(max_new_tokens=4, slot=slot, policy=await world.policy(1)) for slot in spread(fakes)
    ]
    calm = [await world.sampler.sample(r) for r in requests]
    both, replica = world.sampler.fleet, world.sampler.fleet.replicas[0]
    place: Any = both._device if after == "write" else replica.server
    name = "run" if after == "write" else after
    call, lost = getattr(place, name), list[Any]()

    async def lose(*given: Any, **more: Any) -> Any:
        answer = await call(*given, **more)
        if not lost and (after != "write" or given[0] == both._write_adapter):
            lost.append(name)
            both.mark_lost(replica, ServerGone("a sample broke off"))
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(place, name, lose)
        await world.sampler.sample(request(policy=await world.policy(2)))
    assert lost
    before, clock = num_sampled(fakes[0]), asyncio.get_running_loop().time
    await eventually(lambda: replica.card is not None or clock() > replica.ask_again_at)
    again = [await world.sampler.sample(r) for r in requests]
    assert [t.completion_ids for t in again] == [t.completion_ids for t in calm]
    assert num_sampled(fakes[0]) > before
    assert not both.warnings


async def test_a_server_that_stays_away_is_asked_less_and_less() -> None:
    """The number of requests that fail with it makes no difference."""
    replica = Replica(VllmServer("http://nowhere"), card=ServerCard("base", 128, {}, "/model"))
    waits, now = [], 100.0
    for _ in range(8):
        for _ in range(5):
            replica.mark_lost(ServerGone("it broke off"), now=now)
        waits.append(replica.ask_again_at - now)
        now = replica.ask_again_at
    assert waits == [1, 2, 4, 8, 16, 32, 32, 32]
    await replica.server.aclose()


async def test_with_every_server_away_a_request_waits_for_one(
    base: Fallback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_state, "BACK_S", 0.01)
    fake = FakeVllm(base)
    async with fake_vllms(fake) as urls:
        await fake.die()
        async with sampling_on(urls, tmp_path, patience_s=0.1) as world:
            with pytest.raises(TransientError, match=f"no sampler answers: .*{urls[0]}"):
                await world.sampler.sample(request())
        async with sampling_on(urls, tmp_path) as world:
            task = asyncio.create_task(world.sampler.sample(request()))
            await eventually(lambda: world.sampler.fleet.replicas[0].away is not None)
            await fake.start()
            assert (await task).completion_ids


async def test_to_prepare_is_to_wait_for_a_server_that_has_the_version(
    base: Fallback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_state, "BACK_S", 0.01)
    fake = FakeVllm(base)
    async with fake_vllms(fake) as urls, sampling_on(urls, tmp_path) as world:
        await fake.die()
        asked = request(policy=await world.policy(1))
        task = asyncio.create_task(world.sampler.prepare(asked))
        await eventually(lambda: world.sampler.fleet.replicas[0].away is not None)
        assert not task.done()
        await fake.start()
        await task
        assert (len(fake.loads), num_sampled(fake)) == (1, 0)
        await world.sampler.sample(asked)
        assert (len(fake.loads), num_sampled(fake)) == (1, 1)


async def test_a_dora_is_refused_before_a_server_gets_it(
    world: World, fakes: tuple[FakeVllm, FakeVllm]
) -> None:
    made = await world.engine.learner.initialize(job(lora_variant="dora"))
    asked = world.ask(policy=world.shelf.policy(made.state))
    with pytest.raises(Refused, match=r"DoRA.*HEADRACE_SAMPLER=torch.*checkpoint merge"):
        await world.sampler.sample(asked)
    assert not any(fake.loads for fake in fakes)


async def test_a_dora_is_not_deployed_on_vllm(
    world: World, fakes: tuple[FakeVllm, FakeVllm], tmp_path: Path
) -> None:
    made = await world.engine.learner.initialize(job(lora_variant="dora"))
    served = ServedModel(
        name="sums",
        base_name="tiny",
        model=world.model,
        policy=world.shelf.policy(made.state),
        lora_alpha=32.0,
        run="r1",
        run_name="first",
        step=1,
    )
    ports = DeployPorts(
        world.sampler, Settings.load({"HEADRACE_HOME": str(tmp_path)}), bench(tmp_path).ports.log
    )
    with pytest.raises(Refused, match=r"DoRA.*HEADRACE_SAMPLER=torch.*checkpoint merge"):
        await load_model(LoadModel(request="d1", served=served, others=0), ports)
    assert not any(fake.loads for fake in fakes)


async def test_a_server_that_ignores_its_adapter_is_fenced_and_the_other_goes_on(
    world: World, fakes: tuple[FakeVllm, FakeVllm]
) -> None:
    """Twin: at version 0, which is the base, nothing can be told apart, and no server is fenced."""
    fakes[0].deaf = True
    requests = [
        request(max_new_tokens=4, slot=slot, policy=PolicyRef(version=0)) for slot in spread(fakes)
    ]
    for asked in requests:
        await world.sampler.sample(asked)
    assert not world.sampler.fleet.warnings
    before = num_sampled(fakes[0])
    policy = await world.policy(1)
    for slot in spread(fakes):
        await world.sampler.sample(request(max_new_tokens=4, slot=slot, policy=policy))
    (warning,) = world.sampler.fleet.warnings
    assert fakes[0].url in warning
    assert num_sampled(fakes[0]) == before
    assert not fakes[0].adapters


async def test_a_server_that_reports_raw_logprobs_is_refused(
    world: World, fakes: tuple[FakeVllm, FakeVllm]
) -> None:
    fakes[1].raw = True
    with pytest.raises(Refused, match="--logprobs-mode processed_logprobs"):
        await world.sampler.sample(request())


async def test_a_server_without_runtime_loading_says_how_to_start_it(
    world: World, fakes: tuple[FakeVllm, FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    for fake in fakes:
        assert fake.server is not None
        app = fake.server.config.loaded_app
        while not hasattr(app, "routes"):
            app = app.app
        app.routes[:] = [r for r in app.routes if "lora" not in r.path]
    with pytest.raises(Refused, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        await world.sampler.sample(request(policy=await world.policy(1)))
