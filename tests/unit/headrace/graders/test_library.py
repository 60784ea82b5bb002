"""The library as a whole: its names, its examples, and its use in an entry point."""

import doctest
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest

import headrace.graders
from headrace.rewards import is_reward
from headrace.user_code.discovery import EntryPointError, load, rewards_of

MODULES = [
    f"headrace.graders.{module.name}"
    for module in pkgutil.iter_modules(headrace.graders.__path__)
    if module.name not in ("mathematics", "generated_tasks")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_are_true(name: str) -> None:
    module = importlib.import_module(name)
    # An example of a decorated function is found through the function that it wraps.
    assert doctest.testmod(module, raise_on_error=True).failed == 0


def test_every_name_but_two_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("math_verify", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("mathematics", "generated_tasks"):
        monkeypatch.delitem(sys.modules, f"headrace.graders.{module}", raising=False)
    for name in headrace.graders.__all__:
        if name in ("math_verify", "reasoning_gym"):
            package = name.replace("_", "-")
            with pytest.raises(ImportError, match=rf"add .{package}.* in the pyproject\.toml"):
                getattr(headrace.graders, name)
        else:
            assert is_reward(getattr(headrace.graders, name))


def test_an_unknown_grader_is_named() -> None:
    with pytest.raises(AttributeError, match="has no 'gsm9k'; it has: exact_match, gsm8k"):
        getattr(headrace.graders, "gsm9k".lower())


def entry(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "rollouts" / "say" / "main.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return path


def test_an_imported_grader_is_a_reward_function_of_the_rollout(tmp_path: Path) -> None:
    source = "from headrace.graders import gsm8k, exact_match as same\n"
    assert sorted(rewards_of(load(entry(tmp_path, source)))) == ["gsm8k", "same"]


def test_a_missing_package_is_said_when_the_entry_point_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    source = "\nfrom headrace.graders import math_verify\n"
    with pytest.raises(EntryPointError, match=r"main.py:2: ImportError: .*pyproject.toml of this"):
        load(entry(tmp_path, source))


def test_the_table_of_the_docs_names_every_grader() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "rewards.md").read_text()
    assert [n for n in headrace.graders.__all__ if f"`{n}`" not in page] == []
