"""A merged model against PEFT's own merge, and against the completions of the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from schemas.sampling import ModelRef
from tests.unit.trainer.support import Shelf, job, request
from tests.unit.trainer.test_policy import checkpoint, logprobs, trained, write
from trainer.engine import Engine
from trainer.model.merge import main

WEIGHTS = "model.safetensors"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
async def test_a_merge_is_pefts_and_answers_as_the_checkpoint_does(
    engine: Engine, shelf: Shelf, tmp_path: Path, targets: str | tuple[str, ...]
) -> None:
    from peft import PeftModel

    files = await trained(engine, job(algorithm="sft", lora_targets=targets))
    folder, made = write(files, tmp_path / "adapter"), tmp_path / "model"
    assert main([str(folder), str(made)]) == 0
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    theirs = PeftModel.from_pretrained(base, folder).merge_and_unload().state_dict()
    before = load_file(folder / "base" / WEIGHTS)
    ours = load_file(made / WEIGHTS)
    assert set(ours) == set(before)
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=0, atol=1e-7), name
    changed = {name for name in ours if not torch.equal(ours[name], before[name])}
    assert {name.rsplit(".", 2)[1] for name in changed} >= {"q_proj", "down_proj"}
    assert ("k_proj" in str(changed)) == (targets == "all-linear")

    chat = await engine.sampler.sample(
        request(model=checkpoint(files, shelf), temperature=0.0, max_new_tokens=20)
    )
    plain = AutoModelForCausalLM.from_pretrained(made).eval()
    tokenizer = AutoTokenizer.from_pretrained(made)
    prompt: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert tuple(prompt["input_ids"][0].tolist()) == chat.prompt_ids
    answer = plain.generate(**prompt, do_sample=False, max_new_tokens=20)
    said = answer[0, len(chat.prompt_ids) :].tolist()
    assert tuple(said) == chat.completion_ids
    assert chat.logprobs == pytest.approx(logprobs(plain, chat), abs=1e-5)
    directory = ModelRef(kind="directory", name=str(made))
    again = await engine.sampler.sample(
        request(model=directory, temperature=0.0, max_new_tokens=20)
    )
    assert again.completion_ids == chat.completion_ids


async def test_weights_are_merged_before_they_are_rounded(engine: Engine, tmp_path: Path) -> None:
    folder = write(await trained(engine, job(algorithm="sft")), tmp_path / "adapter")
    assert main([str(folder), str(tmp_path / "whole")]) == 0
    assert main([str(folder), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    whole, half = (load_file(tmp_path / name / WEIGHTS) for name in ("whole", "half"))
    assert all(torch.equal(whole[name].bfloat16(), half[name]) for name in whole)


async def test_a_base_of_another_shape_is_named(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = write(await trained(engine, job(algorithm="sft"), steps=1), tmp_path / "small")
    config = small / "base" / "config.json"
    fields = json.loads(config.read_text())
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_config(
        type(AutoModelForCausalLM.from_pretrained(small / "base").config)(
            **{**fields, "intermediate_size": 2 * fields["intermediate_size"]}
        )
    )
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(small).save_pretrained(other)
    assert main([str(small), str(tmp_path / "made"), "--base", str(other)]) == 1
    said = capsys.readouterr().err
    assert "does not fit the base model" in said
    assert "mlp.down_proj" in said
    assert not (tmp_path / "made").exists()
