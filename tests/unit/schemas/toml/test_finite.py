"""`inf` and `nan` are refused with their key and line, wherever a TOML is read."""

import tomllib
from pathlib import Path

import pytest

from producers.cli.config_files import read_config
from producers.cli.errors import Failure
from schemas.errors import InvalidConfig
from schemas.toml.finite import non_finite_issues
from schemas.toml.untrusted import read_untrusted_toml

TEXT = (
    """# not here: lr = inf
[training]
note = "lr = inf"
lr = 1e-5

[advanced]
kl_coef = nan
rewards = [
  { name = "a", weight = 1.0 },
  { name = "b", weight = -inf },
]
"a.inf" = 1e999
many = """
    + "["
    + "9" * 400
    + ".0]\n"
)


def found(text: str) -> list[tuple[str, str]]:
    issues = non_finite_issues(text, tomllib.loads(text))
    return [(issue.key, issue.message.partition(";")[0]) for issue in issues]


def test_each_is_named_by_its_key_and_line() -> None:
    assert found(TEXT) == [
        ("advanced.kl_coef", "must be a finite number, got nan in line 7"),
        ("advanced.rewards[1].weight", "must be a finite number, got -inf in line 10"),
        ("advanced.a.inf", "must be a finite number, got inf in line 12"),
        ("advanced.many[0]", "must be a finite number, got inf in line 13"),
    ]


def test_a_text_that_looks_like_one_is_none() -> None:
    assert found('a = "inf"\nb = \'nan\'\ninf = 1\nc = """\nx = inf\n"""\n') == []


def test_a_multiline_text_moves_no_line() -> None:
    text = 'a = """\nb = inf\n"""\nb = inf\n'
    assert found(text) == [("b", "must be a finite number, got inf in line 4")]


def test_both_readers_refuse_inf_and_nan(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[training]\nlr = inf\n")
    with pytest.raises(Failure, match=r"training\.lr: must be a finite number, got inf in line 2"):
        read_config(config)
    with pytest.raises(InvalidConfig, match=r"headrace\.toml: a: .* got nan in line 1"):
        read_untrusted_toml(b"a = nan", "headrace.toml")
