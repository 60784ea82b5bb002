"""A config file is checked before it is parsed."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from producers.cli.config_files import MAX_BYTES, check_kind, read_config, read_secrets
from producers.cli.errors import Failure
from tests.unit.producers.cli.conftest import Run


def test_a_file_of_megabytes_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "big.toml"
    path.write_text("# " + "x" * MAX_BYTES)
    parsed: list[str] = []

    def loads(text: str) -> dict[str, Any]:
        parsed.append(text)
        return {}

    monkeypatch.setattr(tomllib, "loads", loads)
    with pytest.raises(Failure, match="larger than 256 KiB"):
        read_config(path)
    assert not parsed
    path.write_text("a = 1")
    read_config(path)
    assert parsed == ["a = 1"], "the twin: below the limit it is parsed"


def test_a_file_of_brackets_is_not_valid_toml(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("a = " + "[" * 50_000)
    with pytest.raises(Failure, match="is not valid TOML"):
        read_config(path)


@pytest.fixture
def limit_of_a_command() -> Iterator[None]:
    """Python's own limit of recursion, which a library may have raised in the process of the tests."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize(
    "text", ["a = " + "9" * 5_000, "a = 0x" + "f" * 5_000, ".".join(["a"] * 5_000) + " = 1"]
)
def test_values_beyond_python_or_json_are_not_valid_toml(
    tmp_path: Path, text: str, limit_of_a_command: None
) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(text)
    with pytest.raises(Failure, match="is not valid TOML"):
        read_config(path)


def test_a_file_of_the_other_kind_is_named_with_its_command(tmp_path: Path, headrace: Run) -> None:
    run, evaluation = tmp_path / "run.toml", tmp_path / "eval.toml"
    run.write_text('[experiment]\nmodel_path = "m"\n[training]\nlr = 1.0\n')
    evaluation.write_text('[experiment]\nmodel_path = "m"\n[evaluation]\nn = 1\n')
    wrong = headrace("train", "submit", str(evaluation))
    assert "eval.toml is the file of an evaluation, because it has [evaluation]" in wrong.err
    assert f"`headrace eval submit {evaluation}`" in wrong.err
    wrong = headrace("eval", "submit", str(run))
    assert "run.toml is the file of a training run, because it has [training]" in wrong.err
    assert f"`headrace train submit {run}`" in wrong.err


def test_only_a_file_that_is_surely_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    check_kind({"experiment": {}}, tmp_path, group="train")
    check_kind({"experiment": {}}, tmp_path, group="eval")
    check_kind({"training": {}, "evaluation": {}}, tmp_path, group="train")


def test_a_file_of_secrets_has_a_name_and_a_value_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "keys.env"
    file.write_text(
        '# keys\n\nPLAIN=a=b c\nexport QUOTED="x y"\n SPACED = v \nSINGLE=\'z\'\nHALF="w\nEMPTY=\n'
    )
    assert read_secrets(str(file)) == {
        "PLAIN": "a=b c",
        "QUOTED": "x y",
        "SPACED": "v",
        "SINGLE": "z",
        "HALF": '"w',
        "EMPTY": "",
    }
    assert read_secrets(None) == {}


@pytest.mark.parametrize(
    "line", ["hush-hush-1", "key=hush-hush-1", "A B=hush-hush-1", "=hush-hush"]
)
def test_a_wrong_line_of_secrets_is_named_by_its_number_alone(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys.env"
    file.write_text(f"FINE=1\n{line}\n")
    with pytest.raises(Failure, match="line 2") as refused:
        read_secrets(str(file))
    assert "hush" not in str(refused.value)


def test_a_file_of_secrets_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "binary"
    wrong.write_bytes(b"KEY=\xff\xfe")
    large = tmp_path / "large"
    large.write_bytes(b"A=" + b"x" * (1 << 20))
    for path in (tmp_path / "absent", tmp_path, wrong, large):
        with pytest.raises(Failure):
            read_secrets(str(path))
