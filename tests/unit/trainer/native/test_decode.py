"""Prefill and decoding in C against the same through torch; rows do not affect one another."""

import asyncio
import math
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from schemas.sampling import ModelRef, SamplingParams
from tests.kit.postgres import missing
from tests.unit.trainer.sampler.test_decode_model import QWEN2 as QWEN2_OF_8
from tests.unit.trainer.sampler.test_decode_model import QWEN3 as QWEN3_OF_8
from tests.unit.trainer.sampler.test_decode_model import _llama, base_of, decoder
from tests.unit.trainer.support import Shelf, request
from trainer.engine import Engine
from trainer.forward.decoder import causal_attend
from trainer.forward.weights import trainable_view
from trainer.model.lora import fresh_adapter, target_modules
from trainer.model.lora_names import Scaling
from trainer.native import decode
from trainer.native.compile import FLAGS, FOLDER, LARGE, SMALL, load_library
from trainer.native.decode import Drawing, DrawnTokens, KeyValueCache, NativeDecoder, RowInput
from trainer.native.packed_weights import WIDE
from trainer.native.threads import run_on_threads
from trainer.sampler.decode_batch import DecodeBatch
from trainer.sampler.decode_model import PACKED_BYTES, FusedModel, decode_model_of, native_for
from trainer.sampler.draw_token import draw_tokens
from trainer.sampler.native_batch import BURST, NativeBatch
from trainer.sampler.prompt_cache import PromptCache

ROWS, CAPACITY = 13, 48


@pytest.fixture(autouse=True)
def compiler() -> None:
    if load_library("decode") is None:
        missing("no C compiler (apt-get install gcc libc6-dev): the sampler decodes through torch")


def heads_of(size: int, config: Callable[[], PreTrainedConfig]) -> Callable[[], PreTrainedConfig]:
    def made() -> PreTrainedConfig:
        made = config()
        made.head_dim = size
        return made

    return made


LLAMA, QWEN2, QWEN3 = (heads_of(16, config) for config in (_llama, QWEN2_OF_8, QWEN3_OF_8))


def wide_qwen3() -> PreTrainedConfig:
    made = QWEN3()
    made.hidden_size = 544
    return made


def fused(config: Callable[[], PreTrainedConfig]) -> FusedModel:
    base = base_of(config)
    fresh = fresh_adapter(base, target_modules(base, "all-linear"), rank=4, seed=0)
    generator = torch.Generator().manual_seed(1)
    noisy = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in fresh.items()}
    view = trainable_view(base.tensors, noisy, scaling=Scaling(8.0))
    made = decode_model_of(decoder(base), view, num_bytes=base.num_bytes)
    assert isinstance(made, FusedModel)
    return made


PROMPTS = [tuple((7 * r + 3 * t) % 103 for t in range(n)) for r, n in enumerate((1, 16, 33, 75))]
TOKENS = [[(5 * r + t) % 103 for t in range(20)] for r in range(ROWS)]


@contextmanager
def threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def native_in(model: FusedModel) -> NativeDecoder:
    assert model.native_decoder is not None
    return model.native_decoder


def followed(model: FusedModel, rows: Sequence[int], *, steps: int = 20) -> torch.Tensor:
    """The logits of given continuations, (rows, steps, V); row r continues prompt r % 4."""
    own = native_in(model)
    read = [cache for cache, _ in own.read(PROMPTS)]
    room = own.cache(steps, len(rows))
    found = []
    for step in range(steps):
        readings = []
        for r, slot in zip(rows, room, strict=True):
            prompt = read[r % len(read)]
            readings.append(RowInput(TOKENS[r][step], prompt.length + step, slot, prompt))
        found.append(own.logits(readings))
    return torch.stack(found, dim=1)


@pytest.mark.parametrize(
    ("config", "atol"), [(LLAMA, 1e-5), (QWEN2, 1e-5), (QWEN3, 1e-5), (wide_qwen3, 5e-5)]
)
def test_prompts_and_what_follows_them_are_read_as_through_torch(
    config: Callable[[], PreTrainedConfig], atol: float
) -> None:
    """The logits of the wide model are larger."""
    model = fused(config)
    found = followed(model, range(ROWS))
    for r in range(ROWS):
        prompt = PROMPTS[r % len(PROMPTS)]
        ids = torch.tensor([*prompt, *TOKENS[r]])
        seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        attend = causal_attend(seen, kv_heads=model.decoder.kv_heads)
        with torch.no_grad():
            expected = model.logits(model.hidden_states(ids, torch.arange(len(ids)), attend))
        torch.testing.assert_close(
            found[r].log_softmax(-1), expected[len(prompt) :].log_softmax(-1), atol=atol, rtol=0
        )
        _, first = native_in(model).read([prompt])[0]
        torch.testing.assert_close(
            first.log_softmax(-1), expected[len(prompt) - 1].log_softmax(-1), atol=atol, rtol=0
        )


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_row_has_its_bits_in_any_company_and_on_any_number_of_threads(num: int) -> None:
    model = fused(QWEN3)
    expected = followed(model, range(ROWS))
    with threads(num):
        assert torch.equal(followed(model, range(ROWS)), expected)
        assert torch.equal(followed(model, [5]), expected[5:6])
        assert torch.equal(followed(model, [12, 3, 7])[1], expected[3])


@pytest.mark.parametrize("num", [1, 2])
def test_a_prompt_has_its_bits_wherever_a_pass_ends(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fused(QWEN3)
    alone = [native_in(model).read([prompt])[0] for prompt in PROMPTS]
    monkeypatch.setattr(decode, "PASS_ROWS", 23)
    with threads(num):
        together = native_in(model).read(PROMPTS)
    for (one, first), (other, second) in zip(alone, together, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(_kept(one), _kept(other))


@pytest.mark.parametrize(
    ("prompts", "read"),
    [
        ([(*range(37), 9), (*range(37), 8, 7), (*range(37),)], [36, 2 + 3 + 1]),
        ([(*range(33), 5)] * 3, [33, 3]),
        ([(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 6)], [12]),
        ([(1, *range(40)), (2, *range(40))], [82]),
        ([tuple(range(40))], [40]),
    ],
)
def test_a_beginning_of_all_prompts_is_read_once(
    monkeypatch: pytest.MonkeyPatch, prompts: list[tuple[int, ...]], read: list[int]
) -> None:
    """Unless it is too little, or not the beginning of all. The bits are those of each prompt alone."""
    own = native_in(fused(QWEN3))
    alone = [own.read([prompt])[0] for prompt in prompts]
    counts: list[int] = []
    logits = NativeDecoder.logits

    def counted(self: NativeDecoder, rows: Sequence[RowInput], **kwargs: Any) -> torch.Tensor:
        counts.append(len(rows))
        return logits(self, rows, **kwargs)

    monkeypatch.setattr(NativeDecoder, "logits", counted)
    together = own.read(prompts)
    assert counts == read
    for (one, first), (other, second) in zip(alone, together, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(_kept(one), _kept(other))


def _kept(cache: KeyValueCache) -> torch.Tensor:
    """Keys and values of the positions that were written, (2, layers, K, length, D)."""
    keys, values = cache.data
    keys = keys.unflatten(2, (-1, WIDE)).flatten(3).unflatten(3, (-1, WIDE))
    keys = keys.transpose(-1, -2).flatten(2, 3)
    return torch.stack([keys, values])[:, :, :, : cache.length]


@pytest.mark.parametrize("num", [1, 2])
def test_draws_are_those_of_choose(num: int) -> None:
    """Greedy rows are included; logprobs agree to the last bits of a double."""
    model = fused(QWEN3)
    own = native_in(model)
    ((prompt, _),) = own.read([PROMPTS[-1]])
    generator = torch.Generator().manual_seed(3)
    uniforms = torch.rand(12, 24, generator=generator, dtype=torch.float64).tolist()
    temperatures = [(0.0, 0.4, 1.0, 1.7)[r % 4] for r in range(24)]

    def begun() -> list[RowInput]:
        room = own.cache(12, 24)
        return [RowInput(r, prompt.length, room[r], prompt, 99) for r in range(24)]

    with threads(num):
        drawn = own.draw(begun(), Drawing(uniforms, temperatures, ()))
    rows = begun()
    for step in range(12):
        tokens, logprobs = draw_tokens(
            own.logits(rows), temperatures=temperatures, top_ps=[1.0] * 24, uniforms=uniforms[step]
        )
        assert [row[step] for row in drawn.tokens] == tokens
        assert [row[step] for row in drawn.logprobs] == pytest.approx(logprobs, abs=1e-13)
        rows = [
            replace(row, token=token, position=row.position + 1)
            for row, token in zip(rows, tokens, strict=True)
        ]


def test_a_row_ends_by_itself_and_changes_nothing_for_the_others() -> None:
    """At a stop id, at its last token, or at a value that is not finite."""
    own = native_in(fused(QWEN3))
    prompts = [cache for cache, _ in own.read([PROMPTS[-1]] * 2)]
    prompts[1].data.fill_(float("nan"))
    uniforms = torch.rand(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def drawn(stop_ids: Sequence[int], lefts: Sequence[int], spoilt: int | None) -> DrawnTokens:
        room = own.cache(8, 6)
        rows = [
            RowInput(r, prompts[0].length, room[r], prompts[int(r == spoilt)], lefts[r])
            for r in range(6)
        ]
        return own.draw(rows, Drawing(uniforms.tolist(), [1.0] * 6, stop_ids))

    free = drawn((), [99] * 6, None)
    stop = free.tokens[2][4]
    cut = drawn((stop,), [99, 99, 99, 3, 99, 99], 5)
    for r in range(5):
        tokens = free.tokens[r][: 3 if r == 3 else 8]
        expected = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert cut.tokens[r] == expected
        assert cut.logprobs[r] == free.logprobs[r][: len(expected)]
    assert len(cut.tokens[2]) <= 5
    assert (len(cut.tokens[5]), [math.isfinite(x) for x in cut.logprobs[5]]) == (1, [False])


def test_a_helper_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: a step that assigns its rows in advance would hang here."""
    model = fused(QWEN3)
    expected = followed(model, range(ROWS))
    asleep, over = ThreadPoolExecutor(1), threading.Event()
    asleep.submit(over.wait)
    try:
        monkeypatch.setattr("trainer.native.threads._helpers", lambda _: asleep)
        with threads(2):
            assert torch.equal(followed(model, range(ROWS)), expected)
    finally:
        over.set()
        asleep.shutdown()


def test_a_machine_with_many_cores_runs_no_more_threads_than_find_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits equal those of one thread."""
    model = fused(QWEN3)
    expected = followed(model, range(ROWS), steps=2)
    seen: list[int] = []

    def counted(run: Callable[[int], None], num: int) -> None:
        seen.append(num)
        run_on_threads(run, num)

    monkeypatch.setattr(decode, "run_on_threads", counted)
    with threads(40):
        assert torch.equal(followed(model, range(ROWS), steps=2), expected)
    assert set(seen) == {decode.MOST_THREADS}


def test_rows_of_fixed_shapes_come_from_torch() -> None:
    """Their bits must not depend on whether there is a compiler."""
    model = fused(QWEN3)
    found, expected = (
        DecodeBatch(each, capacity=CAPACITY, size=ROWS, fixed=True).logits(
            torch.arange(ROWS), torch.arange(ROWS)
        )
        for each in (model, replace(model, bases=None))
    )
    assert torch.equal(found, expected)
    read = [
        PromptCache().get("v", each, PROMPTS, native=None)[PROMPTS[2]].logits_V
        for each in (model, replace(model, bases=None))
    ]
    assert torch.equal(*read)


async def test_it_samples_what_torch_samples(
    engine: Engine, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and answers of all lengths, rows that outgrow their batch, and greedy and truncated
    rows among them."""
    asked = [
        request("x" * (5 * i), sample=i, max_new_tokens=1 + 13 * i % 150, temperature=i % 3 / 2)
        for i in range(20)
    ]
    cut = request(sample=7, top_p=0.5, max_new_tokens=10)
    asked.append(cut.model_copy(update={"key": cut.key.model_copy(update={"purpose": "evaluate"})}))
    stepped: list[int] = []
    step = NativeBatch.step

    def seen(batch: NativeBatch) -> int:
        stepped.append(step(batch))
        return stepped[-1]

    monkeypatch.setattr(NativeBatch, "step", seen)
    found = await asyncio.gather(*(engine.sampler.sample(each) for each in asked))
    assert max(stepped) == BURST
    monkeypatch.setattr("trainer.native.decode.load_library", lambda _: None)
    other = Engine(fetch=shelf.fetch, threads=1)
    expected = await asyncio.gather(*(other.sampler.sample(each) for each in asked))
    await other.aclose()
    for one, theirs in zip(found, expected, strict=True):
        assert one.completion_ids == theirs.completion_ids
        assert one.finish_reason == theirs.finish_reason
        assert one.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


async def test_a_row_of_any_company_has_the_same_bits_through_the_engine(engine: Engine) -> None:
    asked = [request("x" * i, sample=i, max_new_tokens=5 + 9 * i % 90) for i in range(12)]
    together = await asyncio.gather(*(engine.sampler.sample(each) for each in asked))
    assert [await engine.sampler.sample(each) for each in asked] == together


def params_of(*, allows: bool, deterministic: bool = False) -> SamplingParams:
    return SamplingParams(allows_wide_native=allows, deterministic=deterministic)


@pytest.mark.parametrize(
    ("config", "allows", "deterministic", "runs_in_c"),
    [
        (QWEN3, False, False, True),
        (QWEN3, True, True, False),
        (wide_qwen3, False, False, False),
        (wide_qwen3, True, False, True),
        (wide_qwen3, True, True, False),
    ],
)
def test_a_wide_model_runs_in_c_only_for_rows_that_allow_it(
    config: Callable[[], PreTrainedConfig], allows: bool, deterministic: bool, runs_in_c: bool
) -> None:
    params = params_of(allows=allows, deterministic=deterministic)
    assert (native_for(fused(config), params) is not None) == runs_in_c


def test_a_wide_model_that_cannot_be_packed_once_is_left_to_torch() -> None:
    """A base too large for one more copy, weights that are all trained, and a DoRA, whose versions are
    packed from nothing."""
    base, allowed = base_of(wide_qwen3), params_of(allows=True)
    fresh = fresh_adapter(base, target_modules(base, "all-linear"), rank=4, seed=0)
    adapter = trainable_view(base.tensors, fresh, scaling=Scaling(8.0))
    full = trainable_view(base.tensors, dict(base.tensors), scaling=Scaling(1.0))
    one = torch.ones(1)
    for view, num_bytes, runs_in_c in (
        (adapter, PACKED_BYTES, True),
        (adapter, PACKED_BYTES + 1, False),
        (full, base.num_bytes, False),
        (replace(adapter, factors=dict.fromkeys(adapter.pairs, one)), base.num_bytes, False),
    ):
        model = decode_model_of(decoder(base), view, num_bytes=num_bytes)
        assert (native_for(model, allowed) is not None) == runs_in_c


async def test_rows_in_c_and_through_torch_share_an_engine(tmp_path: Path, shelf: Shelf) -> None:
    """Of one wide model: those of a run that began before, and those of a new one. Each has the bits
    that it has alone, and only the new ones have other bits than before."""
    base = base_of(wide_qwen3)
    base.model.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    ref = ModelRef(kind="directory", name=str(tmp_path))
    asked = [
        request("x" * i, sample=i, model=ref, max_new_tokens=12, allows_wide_native=i % 2 == 1)
        for i in range(6)
    ]
    engine = Engine(fetch=shelf.fetch, threads=1)
    together = await asyncio.gather(*(engine.sampler.sample(each) for each in asked))
    assert [await engine.sampler.sample(each) for each in asked] == together
    before = [request("x" * i, sample=i, model=ref, max_new_tokens=12) for i in range(len(asked))]
    torch_only = await asyncio.gather(*(engine.sampler.sample(each) for each in before))
    await engine.aclose()
    for i, (now, then) in enumerate(zip(together, torch_only, strict=True)):
        assert now.completion_ids == then.completion_ids
        assert (now.logprobs == then.logprobs) == (i % 2 == 0)
        assert now.logprobs == pytest.approx(then.logprobs, abs=5e-5)


def test_without_a_compiler_torch_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "load_library", lambda _: None)
    assert fused(QWEN3).native_decoder is None


def test_a_compiler_that_fails_is_told_and_torch_decodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "cc"
    says = "[ $1 = --version ] && exec echo a compiler\necho 'out of registers' >&2\nexit 1\n"
    broken.write_text(f"#!/bin/sh\n{says}")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    try:
        assert load_library("decode") is None
    finally:
        load_library.cache_clear()
    assert "decode runs through torch" in caplog.text
    assert "out of registers" in caplog.text, "what it said"
    assert not list((tmp_path / "headrace").iterdir())


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    assert load_library("decode") is not None
    (made,) = (tmp_path / "headrace").iterdir()
    load_library.cache_clear()

    def refused(*_: object, **__: Any) -> None:
        raise subprocess.SubprocessError("compiled again")

    monkeypatch.setattr(subprocess, "run", refused)
    try:
        assert load_library("decode") is not None, made
    finally:
        load_library.cache_clear()


def test_sizes_that_are_no_whole_vectors_are_left_to_torch() -> None:
    base = base_of(heads_of(24, QWEN3_OF_8))
    view = trainable_view(base.tensors, {}, scaling=Scaling(1.0))
    model = decode_model_of(decoder(base), view, num_bytes=base.num_bytes)
    assert (model.is_narrow, model.native_decoder) == (True, None)


ARM = "aarch64-linux-gnu-gcc"


@pytest.mark.parametrize("cc", ["gcc", "clang", ARM])
@pytest.mark.parametrize("source", sorted(path.name for path in FOLDER.glob("*.c")))
def test_it_compiles_without_a_warning(source: str, cc: str, tmp_path: Path) -> None:
    if shutil.which(cc) is None:
        missing(f"no {cc} (apt-get install gcc clang gcc-aarch64-linux-gnu libc6-dev-arm64-cross)")
    flags = [flag for flag in FLAGS if flag != "-march=native" or cc != ARM]
    # On processors without AVX-512 compilers say that functions of vectors of 64 bytes cannot be called
    # from other libraries, which nothing does: all are static.
    flags.append("-Wno-psabi")
    defines = ("-DFLOAT", *(["-DDOUBLE"] if source == "learn.c" else []))
    is_x86 = cc != ARM and platform.machine() == "x86_64"
    targets = [[], *([["-mno-avx512f"]] if is_x86 else [])]
    for target, size, define in product(targets, (SMALL, LARGE), defines):
        options = [*flags, *target, "-O0", "-Wall", "-Wextra", "-Werror", f"-DBYTES={size}", define]
        command = [cc, *options, str(FOLDER / source), "-o", str(tmp_path / "made"), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
