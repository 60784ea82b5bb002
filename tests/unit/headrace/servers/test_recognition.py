"""A rollout server is recognised by its text."""

import ast
from pathlib import Path

import pytest

from headrace.servers.recognition import served_kind
from tests.agents.rollout_programs import (
    OLDER_STRANDS,
    OPENAI_AGENTS,
    STRANDS,
    VERIFIERS_V0,
    VERIFIERS_V1,
)
from tests.kit.rollout_server import ENDS, SERVER, WRONG_PORT

SERVERS = {
    "strands": STRANDS,
    "openai agents": OPENAI_AGENTS,
    "older": OLDER_STRANDS,
    "of its own": SERVER,
    "ends": ENDS,
    "wrong port": WRONG_PORT,
    "by the module": "from osmosis_ai.rollout import server\nserver.create_rollout_server()",
}
OTHERS = {
    "empty": "",
    "ours": "from headrace import AgentWorkflow\nimport os\nos.environ.get('ROLLOUT_PORT')",
    "ours by module": "import headrace\nclass A(headrace.Grader): pass\nx = 'ROLLOUT_PORT'",
    "older decorators": "from osmosis_ai import osmosis_reward",
}


@pytest.mark.parametrize("name", SERVERS)
def test_programs_that_serve_are_recognised(name: str, tmp_path: Path) -> None:
    assert served_kind(ast.parse(SERVERS[name]), tmp_path / "main.py") == "server"


@pytest.mark.parametrize("text", [VERIFIERS_V0, VERIFIERS_V1])
def test_environments_are_recognised(text: str, tmp_path: Path) -> None:
    assert served_kind(ast.parse(text), tmp_path / "main.py") == "environment"


@pytest.mark.parametrize("name", OTHERS)
def test_other_entry_points_are_not_taken_for_servers(name: str, tmp_path: Path) -> None:
    assert served_kind(ast.parse(OTHERS[name]), tmp_path / "main.py") is None


@pytest.mark.parametrize(
    ("kind", "found"), [("server", "server"), ("environment", "environment"), ("classes", None)]
)
def test_a_rollout_may_say_what_it_is(tmp_path: Path, kind: str, found: str | None) -> None:
    entry = tmp_path / "rollouts" / "a" / "src" / "main.py"
    entry.parent.mkdir(parents=True)
    project = tmp_path / "rollouts" / "a" / "pyproject.toml"
    project.write_text(f'[tool.headrace]\nkind = "{kind}"\n')
    assert served_kind(ast.parse("" if found else STRANDS), entry) == found
    project.write_text("[tool")
    assert served_kind(ast.parse(STRANDS), entry) == "server", "what cannot be read says nothing"
