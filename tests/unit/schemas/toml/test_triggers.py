"""`headrace.toml` becomes triggers, or a list of everything that is wrong with it."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.core.run_names import NAME
from schemas.errors import InvalidConfig, Issue
from schemas.toml.name_templates import FIELDS, fill_template
from schemas.toml.overrides import MOST_OVERRIDE_BYTES, apply_overrides
from schemas.toml.triggers import Trigger, parse_triggers
from schemas.toml.untrusted import MOST_BYTES

ONE = '[[trigger]]\nconfig = "configs/training/x.toml"\n'


def only(text: str) -> Trigger:
    [trigger] = parse_triggers((ONE + text).encode())
    return trigger


def refused(content: str | bytes) -> dict[str, Issue]:
    with pytest.raises(InvalidConfig) as refusal:
        parse_triggers(content if isinstance(content, bytes) else content.encode())
    return {issue.key: issue for issue in refusal.value.issues}


def message(content: str | bytes) -> str:
    with pytest.raises(InvalidConfig) as refusal:
        parse_triggers(content if isinstance(content, bytes) else content.encode())
    return refusal.value.message


def test_a_trigger_has_defaults() -> None:
    trigger = only("")
    assert trigger.name == "{config}-{short_sha}"
    assert trigger.stem == "x"
    assert trigger.concurrency == "queue"
    assert trigger.max_runs_per_day is None
    assert not trigger.require_approval
    assert parse_triggers(b"") == ()


@pytest.mark.parametrize(
    ("keys", "ref", "wanted"),
    [
        ("", "refs/heads/any/branch", True),
        ("", "refs/tags/v1", False),
        ("", "refs/pull/1/head", False),
        ('branches = ["main"]', "refs/heads/main", True),
        ('branches = ["main"]', "refs/heads/other", False),
        ('branches = ["main"]', "refs/tags/main", False),
        ('branches = ["!wip/**"]', "refs/heads/wip/x", False),
        ('branches = ["!wip/**"]', "refs/heads/x", True),
        ('tags = ["v*"]', "refs/tags/v1", True),
        ('tags = ["v*"]', "refs/heads/v1", False),
        ('tags = ["v*"]\nbranches = ["main"]', "refs/heads/main", True),
        ('tags = ["v*"]\nbranches = ["main"]', "refs/heads/v1", False),
    ],
)
def test_a_trigger_matches_branches_and_tags(keys: str, ref: str, wanted: bool) -> None:
    assert only(keys).wants_ref(ref) is wanted


@pytest.mark.parametrize(
    ("keys", "changed", "wanted"),
    [
        ("", (), True),
        ('paths = ["src/**"]', ("docs/a", "src/b"), True),
        ('paths = ["src/**"]', ("docs/a",), False),
        ('paths = ["src/**"]', (), False),
        ('paths = ["src/**"]', None, True),
        ('paths = ["!docs/**"]', ("docs/a",), False),
        ('paths = ["!docs/**"]', ("docs/a", "b"), True),
    ],
)
def test_one_changed_file_is_enough(
    keys: str, changed: tuple[str, ...] | None, wanted: bool
) -> None:
    assert only(keys).wants_paths(changed) is wanted


def test_set_takes_tables_and_dotted_keys() -> None:
    trigger = only('set = { "training.lr" = 0.5, advanced = { seed = 3 } }')
    assert trigger.set == {"training": {"lr": 0.5}, "advanced": {"seed": 3}}
    before = {"lr": 1.0, "total_epochs": 2}
    config: dict[str, object] = {"training": before, "experiment": {"dataset": "x"}}
    assert apply_overrides(config, trigger.set) == {
        "training": {"lr": 0.5, "total_epochs": 2},
        "experiment": {"dataset": "x"},
        "advanced": {"seed": 3},
    }
    assert before["lr"] == 1.0


def test_all_mistakes_are_reported_at_once_each_with_its_key() -> None:
    bad = """
[[trigger]]
config = "a.toml"
[[trigger]]
branchs = ["main"]
config = "../x.toml"
branches = ["a**", 3]
concurrency = "que"
max_runs_per_day = 0
require_approval = 1
name = "{sho_sha}"
set = { "a.b" = 1, a = { b = 2 } }
[[triger]]
"""
    issues = refused(bad)
    assert set(issues) == {
        *("trigger[1].branchs", "trigger[1].config", "trigger[1].branches[0]"),
        *("trigger[1].branches[1]", "trigger[1].concurrency", "trigger[1].max_runs_per_day"),
        *("trigger[1].require_approval", "trigger[1].name", "trigger[1].set", "triger"),
    }
    assert issues["trigger[1].branchs"].did_you_mean == "branches"
    assert issues["trigger[1].concurrency"].did_you_mean == "queue"
    assert "{short_sha}" in issues["trigger[1].name"].message
    assert issues["triger"].did_you_mean == "trigger"
    assert issues["trigger[1].max_runs_per_day"].message == "must be at least 1, got 0"


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/x.toml", "../x.toml", "a/../x.toml", "./x.toml", "a//x.toml", "x.json", ".toml"),
        *("a\\\\x.toml", "", "a\\u0000.toml", "x" * 250 + ".toml"),
    ],
)
def test_a_config_outside_of_the_repository_is_refused(path: str) -> None:
    assert "trigger[0].config" in refused(f'[[trigger]]\nconfig = "{path}"\n')


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff", "is not valid TOML"),
        ("a = ", "is not valid TOML"),
        ("a = 1979-01-01", "must not be a date"),
        ("a = " + "9" * 60_000, "is not valid TOML"),
        ("a = " + "[" * 30_000, "levels deep"),
        ("a." * 30_000 + "b = 1", "levels deep"),
        ("a." * 40 + "b = 1", "levels deep"),
        ("[trigger]\nconfig = 'a.toml'", "[[trigger]] with two brackets"),
        ("[[mcp]]\nname = 'x'", "needs a command or a url"),
        ("[[mcp]]\nname = 'x'\nurl = 'https://h'\nkey = 'k'", "the keys are: name, command, url"),
        ("mcp = { name = 'x' }", "must be [[mcp]] with two brackets"),
        ("[[workspace]]\nshared = ['a']", "must be one table, [workspace]"),
        ("workspace = 3", "must be one table, [workspace]"),
        ("[workspace]\nshared = 'a'", "workspace.shared"),
        ("[workspace]\nshares = ['a']", "the keys are: shared"),
        (f"[workspace]\nshared = {['a'] * 17}", "workspace.shared"),
        ("trigger = 3", "must be a list"),
        ("trigger = [3]", "must be a table"),
        ("[[trigger]]", "trigger[0].config: is missing"),
        (ONE + "branches = []", "must have at least one entry"),
        (ONE + f"branches = {json.dumps(['a'] * 51)}", "at most 50 entries"),
        (ONE + f'set = {{ a = "{"x" * MOST_OVERRIDE_BYTES}" }}', "at most 1024 bytes"),
        (ONE + 'set = { "a..b" = 1 }', "must have keys such as"),
        (ONE + f'name = "{"x" * 201}"', "at most 200 characters"),
        (ONE + 'name = "{branch"', "only around the name of a field"),
        (ONE + 'name = "{0.__class__}"', "must use only the fields"),
        (ONE * 101, "at most 100 entries"),
        (
            "".join(f"{ONE}paths = {json.dumps(['a'] * 50)}\n" for _ in range(11)),
            "more than 500 patterns",
        ),
    ],
)
def test_hostile_files_are_refused_quickly(content: str | bytes, says: str) -> None:
    began = time.process_time()
    assert says in message(content)
    assert time.process_time() - began < 1.0


def test_a_large_file_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schemas.toml.untrusted.tomllib", None)
    assert "at most 65536" in message(b"#" * (MOST_BYTES + 1))


FILLED = {
    "workspace": "math",
    "branch": "feature/ä b",
    "ref": "feature/ä b",
    "sha": "0123456789abcdef",
    "short_sha": "0123456789ab",
    "config": "grpo",
    "number": "7",
    "date": "2026-11-22",
}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{config}-{short_sha}", "grpo-0123456789ab"),
        ("{branch}", "feature-b"),
        ("{tag}", "run-0123456789ab"),
        ("-.{workspace}!", "math"),
        ("{date}/{number}", "2026-11-22-7"),
        ("x" * 200, "x" * 100),
    ],
)
def test_a_name_is_filled_and_cleaned(template: str, name: str) -> None:
    assert fill_template(template, FILLED) == name


@given(st.text(max_size=200), st.dictionaries(st.sampled_from(FIELDS), st.text()))
def test_every_filled_name_is_a_run_name(template: str, fields: dict[str, Any]) -> None:
    assert NAME.fullmatch(fill_template(template, {**FILLED, **fields, "short_sha": "0a"}))
