"""The rollouts of a workspace are found from any of its directories."""

import json
from pathlib import Path

import pytest

from producers.cli.errors import Failure
from producers.cli.main import main
from producers.cli.rollouts.templates import make_rollout
from producers.cli.rollouts.workspace_files import file_states, find_rollout


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_rollout(tmp_path, "mine", "single")
    monkeypatch.chdir(tmp_path / "rollouts" / "mine")
    return tmp_path


def test_a_rollout_is_found_with_its_config(workspace: Path) -> None:
    found = find_rollout("mine")
    assert (found.workspace, found.name) == (workspace, "mine")
    assert found.config is not None
    config = workspace / "configs" / "training" / "mine.toml"
    config.rename(config.with_name("other.toml"))
    assert find_rollout("mine").config == found.config
    config.with_name("other.toml").unlink()
    assert find_rollout("mine").config is None


def test_a_wrong_name_gets_a_suggestion(workspace: Path) -> None:
    with pytest.raises(Failure, match="did you mean mine"):
        find_rollout("mne")


def test_outside_of_a_workspace_the_error_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Failure, match="headrace rollout init"):
        find_rollout("mine")


def test_a_change_of_any_file_is_seen(workspace: Path) -> None:
    before = file_states(workspace)
    assert file_states(workspace) == before
    (workspace / "rollouts" / "mine" / "helper.py").write_text("x = 1\n")
    changed = file_states(workspace)
    assert changed != before
    (workspace / "rollouts" / "mine" / "helper.py").unlink()
    assert file_states(workspace) == before


def test_the_lock_of_an_editor_does_not_end_the_watch(workspace: Path) -> None:
    """Emacs locks a file with a link that names no file."""
    before = file_states(workspace)
    (workspace / "rollouts" / "mine" / ".#main.py").symlink_to("me@host.123")
    assert file_states(workspace) == before


def test_rollouts_are_made_and_listed(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "init", "agent", "--template", "strands", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert "rollouts/agent/main.py" in made["files"]
    assert main(["rollout", "list", "--json"]) == 0
    agent, mine = json.loads(capsys.readouterr().out)["rollouts"]
    assert (agent["name"], agent["config"]) == ("agent", "configs/training/agent.toml")
    assert agent["packages"] == ["strands-agents[openai]>=1.10"]
    assert mine["packages"] == []
