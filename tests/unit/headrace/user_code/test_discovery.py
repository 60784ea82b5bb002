"""The objects that an entry point may name, and the errors for one that cannot be used."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace import AgentWorkflow, Grader, reward
from headrace.user_code.discovery import (
    EntryPointError,
    grader_of,
    load,
    rewards_of,
    tools_of,
    workflow_of,
)

GOOD = """
from headrace import AgentWorkflow, Grader, reward

class Base(AgentWorkflow):
    pass

class Solve(AgentWorkflow):
    async def run(self, ctx):
        return None

Alias = Solve

class Check(Grader):
    async def grade(self, ctx):
        pass

@reward
def exact(solution_str, ground_truth, extra_info=None, **kwargs):
    return 1.0
"""


def entry(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "rollouts" / "say" / "main.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return path


def test_one_of_each_is_found(tmp_path: Path) -> None:
    module = load(entry(tmp_path, GOOD))
    workflow, grader = workflow_of(module), grader_of(module)
    assert workflow is not None
    assert workflow.__name__ == "Solve"
    assert grader is not None
    assert grader.__name__ == "Check"
    assert list(rewards_of(module)) == ["exact"]


def test_nothing_is_nothing(tmp_path: Path) -> None:
    module = load(entry(tmp_path, "x = 1\n"))
    assert workflow_of(module) is None
    assert grader_of(module) is None


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = (\n", "rollouts/say/main.py:1: SyntaxError"),
        ("\n\nimport nothing_like_this\n", "rollouts/say/main.py:3: ModuleNotFoundError"),
        ("def f():\n    raise ValueError('x')\nf()\n", "rollouts/say/main.py:2: ValueError: x"),
        ("raise SystemExit(3)\n", "rollouts/say/main.py:1: SystemExit: 3 .*leave out sys.exit"),
        ("raise SystemExit\n", r"rollouts/say/main.py:1: SystemExit \(leave out"),
        ("from headrace import Grade\n", "rollouts/say/main.py:1: .*from 'headrace'$"),
    ],
)
def test_a_module_that_does_not_load_is_named_by_file_and_line(
    tmp_path: Path, source: str, says: str
) -> None:
    with pytest.raises(EntryPointError, match=says):
        load(entry(tmp_path, source))


def test_two_workflows_are_refused_with_both_lines(tmp_path: Path) -> None:
    module = load(
        entry(tmp_path, GOOD + "\nclass Other(Solve):\n    async def run(self, ctx): ...\n")
    )
    two = r"two AgentWorkflows: Solve \(line 7\), Other \(line 21\)"
    with pytest.raises(EntryPointError, match=two):
        workflow_of(module)


IMPORTED = """
import sys, types

shared = sys.modules["shared"] = types.ModuleType("shared")
exec('''
from headrace import Grader

class Base(Grader):
    async def grade(self, ctx): ...

class Derived(Base):
    async def grade(self, ctx): ...

class Unrelated(Grader):
    async def grade(self, ctx): ...
''', shared.__dict__)
"""


@pytest.mark.parametrize(
    ("source", "chosen"),
    [
        ("from shared import Base\nclass Check(Base): ...\n", "Check"),
        ("from shared import Base, Unrelated\nclass Check(Base): ...\n", "Check"),
        ("from shared import Base\n", "Base"),
        ("from shared import Base, Derived\n", "Derived"),
    ],
)
def test_a_class_of_the_file_comes_before_those_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, chosen: str
) -> None:
    monkeypatch.delitem(sys.modules, "shared", raising=False)
    module = load(entry(tmp_path, IMPORTED + source))
    monkeypatch.delitem(sys.modules, "shared")
    grader = grader_of(module)
    assert grader is not None
    assert grader.__name__ == chosen


def test_two_imported_classes_are_refused_with_their_module(tmp_path: Path) -> None:
    module = load(entry(tmp_path, IMPORTED + "from shared import Base, Unrelated\n"))
    del sys.modules["shared"]
    with pytest.raises(EntryPointError, match=r"two Graders: Base \(shared, line 0\), Unrelated"):
        grader_of(module)


def test_methods_must_be_async(tmp_path: Path) -> None:
    set_later = "\nSolve.run, Check.grade = Solve.run, Check.grade\n"
    module = load(entry(tmp_path, GOOD.replace("async def", "def") + set_later))
    with pytest.raises(EntryPointError, match=r"main.py:8: Solve.run must be async"):
        workflow_of(module)
    with pytest.raises(EntryPointError, match=r"Check.grade must be async"):
        grader_of(module)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (
            ("run(self, ctx)", "run(self)"),
            r"main.py:8: Solve.run cannot .* `async def run\(self, ctx\)`",
        ),
        (("grade(self, ctx)", "grade(self, ctx, db)"), r"main.py:14: Check.grade cannot .*'db'"),
        (
            (
                "class Solve(AgentWorkflow):",
                "class Solve(AgentWorkflow):\n    def __init__(self, db): ...",
            ),
            r"main.py:8: Solve cannot be made without arguments .*'db'.*default",
        ),
    ],
)
def test_methods_must_take_what_they_get(
    tmp_path: Path, written: tuple[str, str], says: str
) -> None:
    module = load(entry(tmp_path, GOOD.replace(*written)))
    with pytest.raises(EntryPointError, match=says):
        (workflow_of(module), grader_of(module))


def test_a_decorator_may_add_arguments(tmp_path: Path) -> None:
    decorator = """
import functools

def with_db(method):
    @functools.wraps(method)
    async def run(self, ctx):
        return await method(self, ctx, None)
    return run

class Solve"""
    source = GOOD.replace("\nclass Solve", decorator)
    source = source.replace(
        "    async def run(self, ctx):\n        return None",
        "    @with_db\n    async def run(self, ctx, db):\n        return None",
    )
    assert workflow_of(load(entry(tmp_path, source))) is not None


@pytest.mark.parametrize(
    "function",
    [
        lambda answer, truth: 1.0,
        lambda solution_str, ground_truth, extra_info=None: 1.0,
        lambda solution_str, ground_truth, extra_info, **kwargs: 1.0,
        lambda solution_str, truth, extra_info=None, **kwargs: 1.0,
    ],
)
def test_reward_functions_have_one_signature(function: Any) -> None:
    with pytest.raises(TypeError, match="solution_str: str, ground_truth: str"):
        reward(function)


async def test_base_classes_say_what_to_write() -> None:
    with pytest.raises(NotImplementedError, match="async def run"):
        await AgentWorkflow().run(cast("Any", SimpleNamespace(tools=())))
    with pytest.raises(NotImplementedError, match="async def grade"):
        await Grader().grade(cast("Any", None))


TOOLS = """
from headrace import AgentWorkflow, tool

@tool
def add(left: int, right: int) -> int:
    return left + right
"""

LISTED = """
def sub(left: int, right: int) -> int:
    return left - right

class Solve(AgentWorkflow):
    tools = [sub]

    @tool
    def note(self, text: str) -> None:
        pass
"""


def test_tools_without_a_workflow_run_the_built_in_loop(tmp_path: Path) -> None:
    module = load(entry(tmp_path, TOOLS))
    workflow = workflow_of(module)
    assert workflow is AgentWorkflow
    assert tools_of(module, workflow).names == ("add",)


def test_the_list_of_a_workflow_is_offered_with_its_methods(tmp_path: Path) -> None:
    module = load(entry(tmp_path, TOOLS + LISTED))
    workflow = workflow_of(module)
    assert workflow is not None
    assert tools_of(module, workflow).names == ("sub", "note")
    workflow.tools = None
    assert tools_of(module, workflow).names == ("add", "note")


def test_tools_that_cannot_be_offered_name_the_class(tmp_path: Path) -> None:
    source = TOOLS + LISTED.replace("[sub]", "[sub, 3]")
    module = load(entry(tmp_path, source))
    workflow = workflow_of(module)
    assert workflow is not None
    with pytest.raises(EntryPointError, match=r"main.py:\d+: Solve.tools: tools has '3'"):
        tools_of(module, workflow)
