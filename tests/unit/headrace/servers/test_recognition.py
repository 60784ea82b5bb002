"""A rollout server is recognised by its text."""

import ast
from pathlib import Path

import pytest

from headrace.servers.recognition import is_server
from tests.agents.rollout_programs import OLDER_STRANDS, OPENAI_AGENTS, STRANDS
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
    assert is_server(ast.parse(SERVERS[name]), tmp_path / "rollouts" / "a" / "main.py")


@pytest.mark.parametrize("name", OTHERS)
def test_other_entry_points_are_not_taken_for_servers(name: str, tmp_path: Path) -> None:
    assert not is_server(ast.parse(OTHERS[name]), tmp_path / "rollouts" / "a" / "main.py")


@pytest.mark.parametrize(("kind", "serves"), [("server", True), ("classes", False)])
def test_a_rollout_may_say_what_it_is(tmp_path: Path, kind: str, serves: bool) -> None:
    entry = tmp_path / "rollouts" / "a" / "src" / "main.py"
    entry.parent.mkdir(parents=True)
    project = tmp_path / "rollouts" / "a" / "pyproject.toml"
    project.write_text(f'[tool.headrace]\nkind = "{kind}"\n')
    assert is_server(ast.parse(STRANDS if not serves else ""), entry) is serves
    project.write_text("[tool")
    assert is_server(ast.parse(STRANDS), entry), "what cannot be read says nothing"
