"""The example that the package of the client itself prints: `osmosis rollout init` writes a rollout, its
TOML files and a README with the commands to run, and each of these runs here as it is printed.

Only the two methods that a user writes, and the placeholders of the TOML files (model and dataset), are
filled in.
"""

import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from tests.kit.platform import TINY, git
from tests.osmosis import workspace
from tests.osmosis.client import Osmosis
from tests.osmosis.team import Team
from tests.osmosis.test_walk import ENDED, wait

pytestmark = [
    pytest.mark.osmosis,
    pytest.mark.processes,
    pytest.mark.postgres,
    pytest.mark.torch,
    pytest.mark.slow,
]

NAME = "printed"
ROWS = [{"user_prompt": f"Say {n}", "ground_truth": str(n)} for n in range(32)]
"""One batch of the vendor's default size."""

PLACEHOLDERS = {
    "<your-model-path>": TINY,
    "openai/gpt-5-mini": TINY,
    "<your-dataset-name>": NAME,
}


def printed_commands(readme: str) -> list[str]:
    """The commands in the blocks of a README, without their comments."""
    blocks = readme.split("```bash\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
    return [" ".join(shlex.split(line, comments=True)) for line in lines if line.strip()]


@pytest.fixture(scope="module")
def printed(team: Team) -> list[str]:
    """The commands of the README that `rollout init` writes into the worktree."""
    directory = team.directory
    team.member.run("rollout", "init", NAME)
    workspace.fill_in(directory / "rollouts" / NAME / "main.py")
    for kind in ("training", "eval"):
        path = directory / "configs" / kind / f"{NAME}.toml"
        path.write_text(filled_in(path.read_text()))
    (directory / "data" / f"{NAME}.jsonl").write_text(workspace.rows_of(ROWS))
    git(directory, "add", "-A")
    git(directory, "commit", "-q", "-m", "the example")
    git(directory, "config", "push.default", "current")
    return printed_commands((directory / "rollouts" / NAME / "README.md").read_text())


def filled_in(text: str) -> str:
    for placeholder, value in PLACEHOLDERS.items():
        text = text.replace(placeholder, value)
    assert "<your-" not in "".join(line.partition("#")[0] for line in text.splitlines())
    return text


def submitted(team: Team, command: str) -> Mapping[str, Any]:
    """What a command that submits answers. Without a terminal the client wants `--yes`."""
    program, *arguments = shlex.split(command)
    assert program == "osmosis"
    found: Mapping[str, Any] = team.member.run(*arguments, "--yes")["resource"]
    return found


def set_secret(team: Team, name: str) -> None:
    """Set a secret of the workspace, as the comments of the TOML file say."""
    who, more = team.owner, {name: "not-a-real-key"}
    with_value = Osmosis(who.program, who.url, who.home, who.directory, who.api_key, more)
    with_value.run("secret", "set", name, "--scope", "workspace", "--env", name)


def test_the_example_of_the_package_runs_as_printed(team: Team, printed: list[str]) -> None:
    """Its evaluation requires a secret, as printed. The package of the rollout (`pip install`) is
    installed by the platform."""
    install, evaluate, push, train = printed
    assert install == f"pip install -e rollouts/{NAME}"
    assert (team.directory / "rollouts" / NAME / "pyproject.toml").exists()
    team.member.run("dataset", "upload", f"data/{NAME}.jsonl", "--yes")
    assert push == "git push"
    git(team.directory, "push", "-q")

    refused = team.member.refused(*shlex.split(evaluate)[1:], "--yes")
    assert "OPENAI_API_KEY" in refused.message, "the secret is required, and is not set yet"
    set_secret(team, "OPENAI_API_KEY")

    evaluation = submitted(team, evaluate)
    run = submitted(team, train)
    found = wait(
        team.member, "eval", evaluation["name"], lambda e: e["eval_run"]["status"] in ENDED
    )
    assert found["eval_run"]["status"] == "finished", found
    assert found["results"]["graded"] == found["results"]["sampled_rows"] == 3, "a tenth of 32"
    found = wait(
        team.member, "train", run["name"], lambda one: one["training_run"]["status"] in ENDED
    )
    assert found["training_run"]["status"] == "finished", found
    assert found["training_run"]["current_step"] == 1
