"""`headrace checkpoint merge`: the files that it fetches, the model that it writes, and the inputs
that it refuses."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from schemas.sampling import ModelRef
from tests.unit.producers.cli.conftest import FakeServer, Run
from tests.unit.trainer.support import Shelf, job
from tests.unit.trainer.test_policy import checkpoint, trained
from trainer.engine import Engine

pytestmark = pytest.mark.torch


def serve(server: FakeServer, files: dict[str, bytes], *, lie: str | None = None) -> None:
    listed = [
        {
            "name": name,
            "size": len(content),
            "sha256": "0" * 64 if name == lie else hashlib.sha256(content).hexdigest(),
        }
        for name, content in files.items()
    ]
    found = {"run": "r", "step": 3, "ref": "r@3", "files": listed}
    server.answer("GET", "/checkpoints/r@last", {"checkpoint": found})
    for name, content in files.items():
        server.raw("GET", f"/checkpoints/r@3/files/{name}", content)


def umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


async def adapter() -> dict[str, bytes]:
    """The files of a LoRA checkpoint on a base without a public name."""
    engine = Engine(fetch=Shelf().fetch, threads=1)
    files = await trained(engine, job(ModelRef(kind="scratch", name="qwen3-tiny"), algorithm="sft"))
    await engine.aclose()
    return files


async def test_an_adapter_becomes_a_plain_model_directory(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    files = await adapter()
    serve(server, files)
    target = tmp_path / "deep" / "model"
    arguments = ("checkpoint", "merge", "r@last", str(target))
    made = headrace(*arguments, "--dtype", "bfloat16", "--json")
    assert made.code == 0, made.err
    assert made.document["ref"] == "r@3"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model"]
    assert {file["name"] for file in made.document["files"]} == {
        path.name for path in target.iterdir()
    } - {".gitignore"}
    modes = {path.stat().st_mode & 0o777 for path in target.iterdir()}
    assert modes == {0o666 & ~umask()}, "safetensors writes its file for its owner alone"
    ignored = (target / ".gitignore").read_text().splitlines()
    assert ignored[-1] == "*", "a run takes along what git does not ignore"
    assert json.loads((target / "config.json").read_text())["model_type"] == "qwen3"
    assert "float32" not in str({t.dtype for t in load_file(target / "model.safetensors").values()})
    again = headrace(*arguments, "--json")
    assert again.error["code"] == "CONFLICT"


def test_a_merge_that_fails_says_why_and_leaves_nothing(
    server: FakeServer, headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(server, {"adapter_config.json": b"{}"})
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho noise >&2\necho the base is of another shape >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("producers.cli.commands.merge.sys.executable", str(program))
    ran = headrace("checkpoint", "merge", "r@last", str(tmp_path / "deep" / "model"), "--json")
    assert ran.error["code"] == "MERGE_FAILED"
    assert "base is of another shape; name its base model with --base" in ran.error["message"]
    assert list((tmp_path / "deep").iterdir()) == []
    printed = headrace("checkpoint", "merge", "r@last", str(tmp_path / "wide")).out
    assert printed.startswith("downloading r@3 ...\nmerging it in float32 ...\n")


def test_a_checkpoint_of_whole_weights_has_nothing_to_merge(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    serve(server, {"config.json": b"{}", "model.safetensors": b"x"})
    ran = headrace("checkpoint", "merge", "r@last", str(tmp_path / "model"), "--json")
    assert ran.error["code"] == "NOT_AN_ADAPTER"
    assert f"headrace checkpoint download r@3 {tmp_path / 'model'}" in ran.error["message"]
    assert list(tmp_path.iterdir()) == []


def test_a_reward_model_is_not_merged_and_no_base_is_asked_for(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    serve(server, {"adapter_config.json": b'{"task_type": "SEQ_CLS"}'})
    ran = headrace("checkpoint", "merge", "r@last", str(tmp_path / "model"), "--json")
    assert ran.error["code"] == "REWARD_MODEL"
    assert "r@3 is a reward model" in ran.error["message"]
    assert "--base" not in ran.error["message"]
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_not_merged(server: FakeServer, headrace: Run, tmp_path: Path) -> None:
    serve(server, {"adapter_config.json": b"{}"}, lie="adapter_config.json")
    ran = headrace("checkpoint", "merge", "r@last", str(tmp_path / "model"), "--json")
    assert ran.error["code"] == "CORRUPT"
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_checkpoint_is_the_servers_answer(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    ran = headrace("checkpoint", "merge", "r@9", str(tmp_path / "model"), "--json")
    assert ran.error["code"] == "NOT_FOUND"


def test_without_torch_it_says_what_to_install(
    server: FakeServer, headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(server, {"adapter_config.json": b"{}"})
    monkeypatch.setattr("producers.cli.commands.merge.importlib.util.find_spec", lambda name: None)
    ran = headrace("checkpoint", "merge", "r@last", str(tmp_path / "model"), "--json")
    assert ran.error["code"] == "MISSING_LIBRARY"
    assert "headrace[train]" in ran.error["message"]


# peft reads a property that this transformers deprecates; only they can change that.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
async def test_a_downloaded_adapter_of_a_checkpoint_names_a_base_that_loads(
    server: FakeServer, headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that starts from RUN@STEP of a scratch model: its base has no public name and is stored
    with it."""
    from peft import AutoPeftModelForCausalLM

    shelf = Shelf()
    engine = Engine(fetch=shelf.fetch, threads=1)
    start = ModelRef(kind="scratch", name="qwen3-tiny")
    first = await trained(engine, job(start, algorithm="sft", tuning="full"))
    files = await trained(engine, job(checkpoint(first, shelf), run="b", algorithm="sft"))
    await engine.aclose()
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "./base"
    serve(server, files)
    target = tmp_path / "adapter"
    made = headrace("checkpoint", "download", "r@last", str(target), "--json")
    assert made.code == 0, made.err
    assert made.document["base"] == str(target / "base")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    plain = AutoPeftModelForCausalLM.from_pretrained(target)
    found = plain.get_base_model().state_dict()
    name = "model.layers.0.self_attn.q_proj.base_layer.weight"
    wanted = load_file(target / "base" / "model.safetensors")
    assert found[name].equal(wanted["model.layers.0.self_attn.q_proj.weight"])


def test_an_adapter_of_a_public_base_is_saved_as_it_is(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    config = b'{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}'
    serve(server, {"adapter_config.json": config})
    made = headrace("checkpoint", "download", "r@last", str(tmp_path / "a"), "--json")
    assert made.document["base"] is None
    assert (tmp_path / "a" / "adapter_config.json").read_bytes() == config
