"""The errors that the text of an entry point shows are found before it runs. A file that only looks
wrong is run."""

import ast
from pathlib import Path

import pytest

from headrace.user_code import discovery
from headrace.user_code.discovery import EntryPointError, load
from headrace.user_code.entry_source import find_problem

ENDS = "import os\nos._exit(3)\n"
IMPORTS = "from headrace import AgentWorkflow, Grader\n"
ONE = "class One(AgentWorkflow):\n    async def run(self, ctx): ...\n"
TWO = "class Two(AgentWorkflow):\n    async def run(self, ctx): ...\n"


def entry(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "rollouts" / "say" / "main.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return path


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = (\n", r"main.py:\d: SyntaxError"),
        (IMPORTS + ONE + TWO, r"two AgentWorkflows: One \(line 4\), Two \(line 6\); keep one"),
        (
            IMPORTS + "class C(Grader):\n    def grade(self, ctx): ...\n",
            "main.py:5: C.grade must be async",
        ),
    ],
)
def test_it_is_refused_before_it_runs(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(EntryPointError, match=says):
        load(entry(tmp_path, ENDS + source))


def test_twin_without_the_reading_it_runs_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "find_problem", lambda *_: None)
    with pytest.raises(EntryPointError, match="SystemExit"):
        load(entry(tmp_path, "raise SystemExit\n" + IMPORTS + ONE + TWO))


@pytest.mark.parametrize(
    "source",
    [
        IMPORTS + ONE + TWO + "del One\n",
        IMPORTS + ONE + TWO + "One = 1\n",
        IMPORTS + ONE + "@print\n" + TWO,
        IMPORTS + ONE + "AgentWorkflow = object\n" + TWO,
        IMPORTS + ONE + "from other import *\n" + TWO,
        IMPORTS + ONE + "class Two(AgentWorkflow):\n    pass\n",
        IMPORTS
        + ONE
        + "if ONCE:\n    class Two(AgentWorkflow):\n        async def run(self, ctx): ...\n",
        IMPORTS + ONE.replace("async def", "@wraps\n    def"),
        IMPORTS + ONE.replace("async def", "def") + "One.run = run\n",
        "from other import AgentWorkflow\n" + ONE + TWO,
        "from headrace import AgentWorkflow as Own\n" + ONE + TWO,
    ],
)
def test_a_file_that_may_be_right_has_no_problem(source: str) -> None:
    assert find_problem(ast.parse(source), Path("/w/rollouts/say/main.py")) is None
