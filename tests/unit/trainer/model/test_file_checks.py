"""A model's files may not refer to other code, or to another base model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from schemas.errors import Refused
from schemas.sampling import ModelRef
from tests.kit.families import SHAPE, save_random_model
from trainer.model import base
from trainer.model.base import build_base


def load(directory: Path) -> None:
    build_base(ModelRef(kind="directory", name=str(directory)), {}, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"_attn_implementation": "evil/kernel"}, "_attn_implementation"),
        ({"attn_implementation": "evil/kernel:run"}, "attn_implementation"),
        ({"text_config": {"_attn_implementation": "evil/kernel"}}, "_attn_implementation"),
        ({"_attn_implementation": {"": "eager", "text": "evil/kernel"}}, "_attn_implementation"),
    ],
)
def test_a_config_that_names_code_of_the_hub_is_refused(
    tmp_path: Path, config: dict[str, Any], key: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    with pytest.raises(Refused, match=f"holds {key} = 'evil/kernel.*code on the hub"):
        load(tmp_path)


def test_twin_without_the_check_the_config_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "check_files", lambda name, what: None)
    document = {"model_type": "qwen3", "_attn_implementation": "evil/kernel"}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(Exception) as raised:
        load(tmp_path)
    assert "code on the hub" not in str(raised.value)


def test_an_adapter_is_not_taken_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "evil/base"})
    )
    with pytest.raises(Refused, match=r"adapter_config\.json, so it is an adapter"):
        load(tmp_path)


def test_an_attention_of_transformers_is_accepted(tmp_path: Path) -> None:
    document = {"model_type": "qwen3", "_attn_implementation": "sdpa"}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(Refused, match="cannot be loaded"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "claimed"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"text_config": {"num_hidden_layers": 10**300}}, "num_hidden_layers = 1000"),
        ({"n_layer": 0}, "n_layer = 0"),
        ({"num_layers": float("nan")}, "num_layers = nan"),
    ],
)
def test_a_model_that_would_be_built_without_end_is_refused(
    tmp_path: Path, config: dict[str, Any], claimed: str
) -> None:
    """It would hold the device of all runs, and take all memory."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    with pytest.raises(Refused, match=f"{claimed}.*may have 1 to 4096 layers"):
        load(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": "32"},
        {"num_hidden_layers": 4.5},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"hidden_act": ["silu"]},
    ],
)
def test_a_config_with_a_wrong_value_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    save_random_model(LlamaConfig(**SHAPE), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(Refused, match="cannot be loaded"):
        load(tmp_path)


def test_a_model_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    """The library would draw them at random, in each process others."""
    save_random_model(LlamaConfig(**SHAPE), tmp_path)
    path = tmp_path / "model.safetensors"
    kept = {name: t for name, t in load_file(path).items() if "layers.3" not in name}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(
        Refused, match=r"lack 9 weights of its config, such as model\.layers\.3\.input"
    ):
        load(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_model_with_a_weight_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    """Its runs would seem to have diverged."""
    save_random_model(LlamaConfig(**SHAPE), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        Refused, match=r"model\.layers\.2\.mlp\.up_proj\.weight holds values that are not fin"
    ):
        load(tmp_path)


def test_a_model_with_templates_of_which_none_is_the_default_is_refused(tmp_path: Path) -> None:
    save_random_model(LlamaConfig(**SHAPE), tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    path = tmp_path / "tokenizer_config.json"
    templates = [{"name": "tools", "template": "a"}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": templates}))
    with pytest.raises(Refused, match="cannot be used: This model has multiple chat templates"):
        load(tmp_path)


def test_a_hub_id_is_not_read_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "private/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    hub = ModelRef(kind="hub", name="private/model")
    with pytest.raises(Refused, match="also a path in the worker's working directory"):
        build_base(hub, {}, device=torch.device("cpu"))
