"""A whole run that samples through vLLM's protocol; `tests/vllm` has the same over real vLLM."""

import asyncio
from pathlib import Path

import pytest
import torch

from schemas.events import RunWarned, SampleRefuted, StepSettled
from schemas.sampling import ModelRef
from tests.kit.tokenizers import readable_model
from tests.kit.vllm import FakeVllm, fake_vllms
from tests.kit.vllm_run import (
    SEED,
    STEPS,
    Trained,
    check,
    check_forced,
    train_forced_run,
    train_run,
)
from trainer.forward.allowed_tokens import AllowedTokens
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import build_base
from trainer.sampler.vllm import engine

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch]


def test_a_run_samples_on_servers_and_is_rebuilt_from_its_log(tmp_path: Path) -> None:
    tiny = ModelRef(kind="scratch", name="qwen3-tiny", seed=SEED)
    fallback = Fallback(build_base(tiny, {}, device=torch.device("cpu")))

    async def run() -> None:
        fakes = (FakeVllm(fallback), FakeVllm(fallback))
        async with fake_vllms(*fakes) as urls:
            check(await train_run(tmp_path, model="qwen3-tiny", vllm=urls), mismatch=1e-6)
        assert all(len(fake.loads) == STEPS for fake in fakes)

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_run_with_full_tuning_gives_servers_its_versions(tmp_path: Path, mode: str) -> None:
    """In step and ahead of it, where versions take turns. The mismatch of a sample that was made ahead
    includes what the policy learned since."""
    tiny = ModelRef(kind="scratch", name="qwen3-tiny", seed=SEED)
    fallback = Fallback(build_base(tiny, {}, device=torch.device("cpu")))
    fakes = (FakeVllm(fallback, dev_mode=True), FakeVllm(fallback, dev_mode=True))
    ahead = {"max_steps_off_policy": 1} if mode == "fully_async" else {}

    async def run() -> Trained:
        async with fake_vllms(*fakes) as urls:
            keys: dict[str, object] = {"tuning": "full", "execution_mode": mode, **ahead}
            return await train_run(tmp_path, model="qwen3-tiny", vllm=urls, **keys)

    found = asyncio.run(run())
    if mode == "sync":
        check(found, mismatch=1e-6)
        assert all(len(fake.reloads) == STEPS for fake in fakes)
    else:
        check(found, mismatch=1.0, num_versions=STEPS - 1)
    assert not [e for e in found.events if isinstance(e, RunWarned)]


def test_twin_with_new_weights_that_are_ignored_a_run_ends(tmp_path: Path) -> None:
    """The first weights are those of the base model; the second are found out."""
    tiny = ModelRef(kind="scratch", name="qwen3-tiny", seed=SEED)
    deaf = FakeVllm(
        Fallback(build_base(tiny, {}, device=torch.device("cpu"))), dev_mode=True, deaf=True
    )

    async def run() -> Trained:
        async with fake_vllms(deaf) as urls:
            return await train_run(tmp_path, model="qwen3-tiny", vllm=urls, tuning="full")

    with pytest.raises(AssertionError, match="every sampler is fenced"):
        asyncio.run(run())


def test_a_run_goes_on_without_a_fenced_server_and_warns(tmp_path: Path) -> None:
    """The first adapter is the base model; from the second on the deaf server is found out."""
    tiny = ModelRef(kind="scratch", name="qwen3-tiny", seed=SEED)
    fallback = Fallback(build_base(tiny, {}, device=torch.device("cpu")))

    async def run() -> None:
        deaf, good = FakeVllm(fallback, deaf=True), FakeVllm(fallback)
        async with fake_vllms(deaf, good) as urls:
            found = await train_run(tmp_path, model="qwen3-tiny", vllm=urls)
        check(found, mismatch=1e-6)
        (warning,) = [e for e in found.events if isinstance(e, RunWarned)]
        assert warning.about == "sampler"
        assert f"{deaf.url} is fenced" in warning.message

    asyncio.run(run())


def train_beside_a_liar(folder: Path, *, lies_every: int | None, **advanced: object) -> Trained:
    tiny = ModelRef(kind="scratch", name="qwen3-tiny", seed=SEED)
    fallback = Fallback(build_base(tiny, {}, device=torch.device("cpu")))
    liar = FakeVllm(fallback, lies_every=lies_every, rounds=True)

    async def run() -> Trained:
        async with fake_vllms(liar, FakeVllm(fallback, rounds=True)) as urls:
            return await train_run(folder, model="qwen3-tiny", vllm=urls, **advanced)

    found = asyncio.run(run())
    assert (liar.lies > 0) == (lies_every is not None)
    return found


def weights_of(found: Trained) -> list[str]:
    return [e.state.weights_sha256 for e in found.events if isinstance(e, StepSettled)]


def test_a_run_beside_a_lying_server_ends_in_the_bits_of_an_honest_one(tmp_path: Path) -> None:
    """Worth its seconds: only a whole run shows that refuted samples are made again with their draws,
    on the other server, and that nothing was trained on the first ones. The twin trains on them."""
    honest = train_beside_a_liar(tmp_path / "honest", lies_every=None)
    found = train_beside_a_liar(tmp_path / "found", lies_every=3)
    twin = train_beside_a_liar(tmp_path / "twin", lies_every=3, attest=False)
    assert weights_of(found) == weights_of(honest)
    assert weights_of(twin) != weights_of(honest)
    assert found.verification.status == "verified", found.verification
    refuted = [e for e in found.events if isinstance(e, SampleRefuted)]
    assert refuted
    assert {e.tokens <= 64 for e in refuted} == {True}
    assert not [e for e in (*honest.events, *twin.events) if isinstance(e, SampleRefuted)]
    warnings = [e for e in found.events if isinstance(e, RunWarned)]
    assert {w.about for w in warnings} == {"refuted"}
    assert {w.category for w in warnings} == {e.server for e in refuted}


def train_forced(folder: Path, *, steps: int = STEPS, **advanced: object) -> Trained:
    tiny = ModelRef(kind="scratch", name="qwen3-tiny", seed=SEED)
    base = build_base(tiny, {}, device=torch.device("cpu"))
    readable_model(base, folder / "model")
    fake = FakeVllm(Fallback(base), max_model_len=512)

    async def run() -> Trained:
        async with fake_vllms(fake) as urls:
            model = folder / "model"
            return await train_forced_run(folder, model=model, vllm=urls, steps=steps, **advanced)

    return asyncio.run(run())


def test_a_run_trains_on_forced_answers_and_is_rebuilt_from_its_log(tmp_path: Path) -> None:
    found = train_forced(tmp_path)
    check_forced(found, mismatch=1e-6)


def test_twin_without_the_masks_in_the_learner_its_logprobs_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AllowedTokens, "restrict", lambda self, logits_C_V: logits_C_V)
    monkeypatch.setattr(engine, "refuse_other_logprobs", lambda *given, **more: None)
    found = train_forced(tmp_path, steps=1, attest=False)
    steps = [e for e in found.events if isinstance(e, StepSettled) and e.step]
    assert [step.metrics["train/sampler_mismatch"] > 0.5 for step in steps] == [True]
