"""A GGUF file becomes a model directory, once, with the values and the tokens that were published."""

import os
import threading
from pathlib import Path

import gguf as library
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from schemas.errors import Refused
from schemas.learner import GradedGroup, StepBatch
from schemas.models.gguf import FORMATS
from schemas.models.gguf_model import SPLITS
from schemas.sampling import ModelRef, SampleRecord
from schemas.sampling import Sequence as Row
from tests.kit.gguf_files import TEMPLATE, write_gguf
from tests.unit.trainer.support import Shelf, job, loss_mask, request
from trainer.engine import Engine
from trainer.forward.decoder import decoder_of
from trainer.model import dequantize, gguf_tokenizer
from trainer.model.base import Base, build_base
from trainer.model.dequantize import dequantize_once
from trainer.model.file_checks import check_files

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 50, 70, 4, 99, 260, 1]])


def load(path: Path) -> Base:
    ref = ModelRef(kind="directory", name=str(path))
    return build_base(ref, {}, device=CPU, models=path.parent / "models")


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)]
)
@torch.no_grad()
def test_the_logits_are_those_of_the_published_model(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    model = write_gguf(tmp_path / "m.gguf", architecture, tied=tied)
    base = load(tmp_path / "m.gguf")
    assert torch.equal(base.model(IDS).logits, model(IDS).logits)
    assert decoder_of(base) is not None, "it runs on the lean decoder"
    assert base.stop_ids == {2}
    assert base.public_name == str(tmp_path / "models" / str(base.gguf_sha256))
    check_files(base.public_name, what="it")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_the_values_are_those_that_transformers_reads(tmp_path: Path, kind: str) -> None:
    write_gguf(tmp_path / "m.gguf", kind=kind)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).state_dict()
    ours = load(tmp_path / "m.gguf").model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_every_quantization_that_is_accepted_is_read() -> None:
    drawn = np.random.default_rng(0)
    for kind, form in FORMATS.items():
        known = library.GGMLQuantizationType(kind)
        assert (form.name, form[1:]) == (known.name, library.GGML_QUANT_SIZES[known])
        data = drawn.integers(0, 100, 3 * form.num_bytes, dtype=np.uint8).tobytes()
        assert dequantize._dequantize(data, kind, 3).shape == (3, form.num_values)


TEXT = "hello  17 héllo ab\n\n\n  7<|im_end|>it's 2026"


def test_the_tokens_are_those_that_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(gguf_tokenizer.SPLITS, "smollm")
    for split in gguf_tokenizer.SPLITS:
        folder = tmp_path / split
        folder.mkdir()
        write_gguf(folder / "m.gguf", split=split)
        ours = load(folder / "m.gguf").tokenizer
        theirs = AutoTokenizer.from_pretrained(folder, gguf_file="m.gguf")
        ids = ours.encode(TEXT, add_special_tokens=False)
        assert ids == theirs.encode(TEXT, add_special_tokens=False)
        assert ours.decode(ids) == TEXT


def test_digits_of_smollm_are_apart_from_the_spaces_before_them(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", split="smollm")
    tokenizer = load(tmp_path / "m.gguf").tokenizer
    ids = tokenizer.encode("a  17", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "ĠĠ", "1", "7"]


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen2", split="qwen2")
    tokenizer = load(tmp_path / "m.gguf").tokenizer
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_every_split_that_is_accepted_is_known() -> None:
    assert set(SPLITS) == set(gguf_tokenizer.SPLITS)


def test_a_file_is_dequantized_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")
    written: list[Path] = []
    write = dequantize._write

    def count_and_write(*arguments: object) -> None:
        written.append(tmp_path)
        write(*arguments)  # type: ignore[arg-type]  # passed on as they are

    monkeypatch.setattr(dequantize, "_write", count_and_write)
    models = tmp_path / "models"
    work = [
        threading.Thread(target=dequantize_once, args=(tmp_path / "m.gguf", models))
        for _ in range(4)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(written) == 1
    write_gguf(tmp_path / "m.gguf", tied=False)
    dequantize_once(tmp_path / "m.gguf", models)
    assert len(written) == 2, "another file has another directory"
    assert len([*models.glob("?" * 64)]) == 2


def test_a_killed_process_leaves_nothing_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf")
    models = tmp_path / "models"
    if (child := os.fork()) == 0:
        monkeypatch.setattr(dequantize, "save_file", lambda *_, **__: os._exit(7))
        dequantize_once(tmp_path / "m.gguf", models)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    (left,) = models.glob("*.partial")
    assert (left / "config.json").is_file()
    made = dequantize_once(tmp_path / "m.gguf", models).directory
    assert (made / "model.safetensors").is_file()
    assert not left.exists()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")]
)
def test_a_full_disk_is_reported_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write_gguf(tmp_path / "m.gguf")

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(dequantize, "save_file", refuse)
    with pytest.raises(Refused, match=r"No space left on device; give .*/models room"):
        load(tmp_path / "m.gguf")
    assert not [path for path in (tmp_path / "models").iterdir() if path.suffix != ".lock"]


def test_a_file_that_changes_while_it_is_read_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf")
    write = dequantize._write

    def change_and_write(*arguments: object) -> None:
        with (tmp_path / "m.gguf").open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(bytes(4))
        write(*arguments)  # type: ignore[arg-type]  # passed on as they are

    monkeypatch.setattr(dequantize, "_write", change_and_write)
    with pytest.raises(Refused, match="changed while it was read"):
        load(tmp_path / "m.gguf")
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("content", "says"), [(b"PK\3\4", "does not begin with GGUF"), (None, "no such file here")]
)
def test_a_file_that_is_no_model_fails_the_run_with_words(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "m.gguf"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    with pytest.raises(Refused, match=says):
        load(path)


def test_a_hostile_template_is_stopped(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "m.gguf", template="{% for a in range(90000) %}{{ 'a' * 300 }}{% endfor %}"
    )
    with pytest.raises(Refused, match=r"cannot be used: the model's chat template wrote more"):
        load(tmp_path / "m.gguf")


async def _train_once(path: Path) -> tuple[str, str, dict[str, str]]:
    """Sample a group, take a GRPO step, and return the hashes and the versions of the result."""
    shelf, ref = Shelf(), ModelRef(kind="directory", name=str(path))
    engine = Engine(fetch=shelf.fetch, threads=1, models=path.parent / "models")
    asked = job(ref)
    first = await engine.learner.initialize(asked)
    policy = shelf.policy(first.state)
    samples = []
    for index in range(4):
        turn = await engine.sampler.sample(request(sample=index, model=ref, policy=policy))
        prompt, answer = turn.prompt_ids, turn.completion_ids
        row = Row(
            tokens=prompt + answer,
            loss_mask=loss_mask(len(prompt), len(answer)),
            logprobs=(0.0,) * len(prompt) + turn.logprobs,
        )
        samples.append(SampleRecord(index=index, sequences=(row,)))
    group = GradedGroup(0, tuple(samples), (1.0, 0.0, 0.5, 0.0))
    step = await engine.learner.step(asked, StepBatch(1, groups=(group,)), export_state=True)
    await engine.aclose()
    assert step.metrics["train/sampler_mismatch"] <= 1e-5
    assert first.state.weights_sha256 != step.state.weights_sha256
    return step.state.weights_sha256, step.state.state_sha256, step.versions


async def test_a_grpo_step_on_a_gguf_file_has_the_same_bits_twice(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, kind="Q8_0", template=TEMPLATE)
    first, second = [await _train_once(path) for _ in range(2)]
    assert first == second
    assert first[2]["gguf"] == dequantize_once(path, tmp_path / "models").sha256
