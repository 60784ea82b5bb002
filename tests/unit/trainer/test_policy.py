"""Weights as plain Transformers and PEFT read them, and models from several sources."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from schemas.errors import Refused
from schemas.learner import Conversation, LearnerJob, StepBatch, StepResult
from schemas.models.scratch import SHAPES, ScratchShape
from schemas.sampling import ModelRef, PolicyRef, Turn
from tests.kit.families import SHAPE, family, save_random_model
from tests.unit.trainer.support import TINY, Shelf, job, request, weights_of
from trainer.engine import Engine
from trainer.forward.decoder import decoder_of
from trainer.model.base import build_base
from trainer.policy import export, parse

CPU = torch.device("cpu")
TALK = tuple(Conversation(i, (("user", f"{i}?"), ("assistant", f"{i * 7 % 10}"))) for i in range(4))


async def trained(engine: Engine, asked: LearnerJob, *, steps: int = 3) -> dict[str, bytes]:
    """A checkpoint's files after a few steps of SFT."""
    first = await engine.learner.initialize(asked)
    last: StepResult = first
    for step in range(1, steps + 1):
        batch = StepBatch(step, conversations=TALK)
        last = await engine.learner.step(asked, batch, export_state=False)
    return {**first.files, first.weights_name: weights_of(last.state)}


def write(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def logprobs(model: PreTrainedModel, turn: Turn) -> list[float]:
    ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(turn.prompt_ids) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(-1, torch.tensor(turn.completion_ids)[:, None])
    return chosen[:, 0].tolist()


def checkpoint(files: dict[str, bytes], shelf: Shelf) -> ModelRef:
    refs = {name: shelf.put(content) for name, content in files.items()}
    return ModelRef(kind="checkpoint", name="run@3", files=refs)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
async def test_an_adapter_loads_in_plain_transformers_and_peft(
    engine: Engine, shelf: Shelf, tmp_path: Path, targets: str | tuple[str, ...]
) -> None:
    from peft import PeftModel

    files = await trained(engine, job(algorithm="sft", lora_targets=targets))
    folder = write(files, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    plain: Any = PeftModel.from_pretrained(base, folder).eval()
    names = {n for n, p in plain.named_parameters() if "lora_" in n}
    assert len(names) == len(parse(files["adapter_model.safetensors"], device=CPU))
    policy = PolicyRef(version=3, weights=shelf.put(files["adapter_model.safetensors"]))
    turn = await engine.sampler.sample(request(policy=policy, max_new_tokens=20))
    assert turn.logprobs == pytest.approx(logprobs(plain, turn), abs=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "hello"}]
    found: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert tuple(found["input_ids"]) == turn.prompt_ids

    merged = request(model=checkpoint(files, shelf), max_new_tokens=20)
    again = await engine.sampler.sample(merged)
    assert again.completion_ids == turn.completion_ids
    assert again.logprobs == pytest.approx(turn.logprobs, abs=1e-5)


async def test_full_weights_load_in_plain_transformers(
    engine: Engine, shelf: Shelf, tmp_path: Path
) -> None:
    files = await trained(engine, job(algorithm="sft", tuning="full"))
    assert not any(name.startswith("base/") for name in files)
    plain = AutoModelForCausalLM.from_pretrained(write(files, tmp_path)).eval()
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template
    policy = PolicyRef(version=3, weights=shelf.put(files["model.safetensors"]))
    asked = request(policy=policy, max_new_tokens=20).model_copy(update={"tuning": "full"})
    turn = await engine.sampler.sample(asked)
    assert turn.logprobs == pytest.approx(logprobs(plain, turn), abs=1e-5)
    again = await engine.sampler.sample(request(model=checkpoint(files, shelf), max_new_tokens=20))
    assert again == turn


async def test_a_run_starts_from_a_checkpoint_and_keeps_its_base(
    engine: Engine, shelf: Shelf, tmp_path: Path
) -> None:
    first = await trained(engine, job(algorithm="sft", tuning="full"))
    second = await trained(engine, job(checkpoint(first, shelf), run="b", algorithm="sft"))
    third = await trained(engine, job(checkpoint(second, shelf), run="c", algorithm="sft"))
    assert second["base/model.safetensors"] == first["model.safetensors"]
    assert third["base/model.safetensors"] != second["base/model.safetensors"]
    assert json.loads(second["adapter_config.json"])["base_model_name_or_path"] == "./base"


async def test_a_directory_is_named_and_not_copied(
    engine: Engine, shelf: Shelf, tmp_path: Path
) -> None:
    write(await trained(engine, job(algorithm="sft", tuning="full")), tmp_path)
    model = ModelRef(kind="directory", name=str(tmp_path))
    files = await trained(engine, job(model, run="b", algorithm="sft"))
    assert not any(name.startswith("base/") for name in files)
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == str(tmp_path)
    await engine.sampler.sample(request(model=checkpoint(files, shelf)))


async def test_files_are_the_same_bytes_every_time(engine: Engine, shelf: Shelf) -> None:
    other = Engine(fetch=shelf.fetch, threads=1)
    assert await trained(engine, job(algorithm="sft")) == await trained(other, job(algorithm="sft"))
    await other.aclose()


def test_export_does_not_depend_on_the_order_of_tensors() -> None:
    tensors = {name: torch.full((3,), float(i)) for i, name in enumerate("abc")}
    assert export(tensors) == export(dict(reversed(tensors.items())))


def _neox() -> PreTrainedConfig:
    """A family that only this test knows."""
    return GPTNeoXConfig(**{key: SHAPE[key] for key in SHAPE if key != "num_key_value_heads"})


@pytest.mark.parametrize(
    ("config", "lean"),
    [(family("llama3").config, True), (family("qwen2.5").config, True), (_neox, False)],
    ids=("llama", "qwen2", "neox"),
)
@pytest.mark.parametrize("tuning", ["lora", "full"])
async def test_families_train_and_sample_alike(
    engine: Engine,
    shelf: Shelf,
    tmp_path: Path,
    config: Callable[[], PreTrainedConfig],
    lean: bool,
    tuning: str,
) -> None:
    model = save_random_model(config(), tmp_path)
    ref = ModelRef(kind="directory", name=str(tmp_path))
    base = build_base(ref, {}, device=CPU)
    assert (decoder_of(base) is not None) == lean

    turn = await engine.sampler.sample(request(model=ref, max_new_tokens=20))
    assert turn.logprobs == pytest.approx(logprobs(model, turn), abs=1e-5)

    files = await trained(engine, job(ref, algorithm="sft", tuning=tuning))
    again = await engine.sampler.sample(request(model=ref, max_new_tokens=20))
    assert again == turn, "training must not write to the shared base"
    weights = files["adapter_model.safetensors" if tuning == "lora" else "model.safetensors"]
    policy = PolicyRef(version=3, weights=shelf.put(weights))
    served = await engine.sampler.sample(request(model=ref, policy=policy, max_new_tokens=20))
    whole = await engine.sampler.sample(request(model=checkpoint(files, shelf), max_new_tokens=20))
    assert served.completion_ids == whole.completion_ids
    assert served.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    assert served.logprobs != turn.logprobs


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes_count_their_parameters(shape: ScratchShape) -> None:
    base = build_base(ModelRef(kind="scratch", name=shape.model_path), {}, device=CPU)
    assert base.model.num_parameters() == shape.num_parameters
    assert decoder_of(base) is not None


def test_the_seed_of_a_scratch_model_decides_its_weights() -> None:
    def weights(seed: int) -> bytes:
        ref = ModelRef(kind="scratch", name="qwen3-tiny", seed=seed)
        return export(build_base(ref, {}, device=CPU).tensors | {"lm_head.weight": torch.zeros(1)})

    state = torch.random.get_rng_state()
    assert weights(1) == weights(1) != weights(2)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_directory_is_refused(tmp_path: Path, broken: str) -> None:
    base = build_base(TINY, {}, device=CPU)
    base.model.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    (tmp_path / broken).write_bytes(b"{ not what it was")
    with pytest.raises(Refused, match="cannot be loaded"):
        build_base(ModelRef(kind="directory", name=str(tmp_path)), {}, device=CPU)


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    base = build_base(TINY, {}, device=CPU)
    base.model.config.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(Refused, match="cannot be loaded"):
        build_base(ModelRef(kind="directory", name=str(tmp_path)), {}, device=CPU)


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    base = build_base(TINY, {}, device=CPU)
    base.model.save_pretrained(tmp_path)
    base.tokenizer.chat_template = None
    base.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(Refused, match=r"has no chat template.*instruction-tuned"):
        build_base(ModelRef(kind="directory", name=str(tmp_path)), {}, device=CPU)


def test_a_model_that_the_device_has_no_room_for_names_the_knobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(Refused, match=r"GiB: set advanced\.precision = 'bfloat16'"):
        build_base(TINY, {}, device=CPU)


def test_a_checkpoint_cannot_write_outside_itself(tmp_path: Path) -> None:
    ref = ModelRef(kind="checkpoint", name="run@1")
    with pytest.raises(Refused, match="outside"):
        build_base(ref, {"../escaped": b"x"}, device=CPU)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    base = build_base(TINY, {}, device=CPU)
    base.model.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(Refused, match="cannot be loaded"):
        build_base(ModelRef(kind="directory", name=str(tmp_path)), {}, device=CPU)
