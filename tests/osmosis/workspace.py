"""A git worktree in the vendor's layout. Its `origin` looks like GitHub, where nothing is fetched from
and nothing pushed to: pushes go to a bare repository on this machine."""

import json
from pathlib import Path

from tests.kit.platform import TINY, git
from tests.osmosis.client import Osmosis

LAYOUT = ("rollouts", "configs/training", "configs/eval", "data")
ROLLOUT = "sums"
TODO = "        raise NotImplementedError(\n"
WORKFLOW = """        await asyncio.sleep(float(os.environ.get("PAUSE_S", "0")))
        context = get_rollout_context()
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(
                f"{context.chat_completions_url}/chat/completions",
                headers={"Authorization": f"Bearer {context.api_key}"},
                json={"model": "osmosis-rollout", "messages": ctx.prompt, "max_tokens": 6},
            )
        answer.raise_for_status()
        return [*ctx.prompt, answer.json()["choices"][0]["message"]]
"""
GRADER = """        said = str(ctx.sample.messages[-1].get("content"))
        ctx.set_reward(sum(character.isdigit() for character in said) / 8)
"""
ROWS = [{"user_prompt": f"Say {n}", "ground_truth": str(n)} for n in range(8)]
TRAINING = f"""
[experiment]
rollout = "{ROLLOUT}"
entrypoint = "main.py"
model_path = "{TINY}"
dataset = "numbers"

[training]
lr = 1e-2
n_samples_per_prompt = 4
rollout_batch_size = 2
max_prompt_length = 64
max_response_length = 6
agent_workflow_timeout_s = 60
grader_timeout_s = 60

[checkpoints]
checkpoint_save_freq = 2

[advanced]
max_steps = 4
seed = 7
deterministic = true
"""

EVALUATION = f"""
[experiment]
rollout = "{ROLLOUT}"
entrypoint = "main.py"
model_path = "MODEL"
dataset = "numbers"

[evaluation]
limit = 8
n = 2
pass_threshold = 0.1
agent_workflow_timeout_s = 60

[env]
PAUSE_S = "3"

[secrets]
required = []

[advanced]
seed = 3
temperature = 1.0
"""
"""An evaluation of MODEL. Each attempt pauses, so that the evaluation can be stopped before it ends."""


def rows_of(rows: list[dict[str, str]]) -> str:
    """The rows as JSON Lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_worktree(directory: Path, bare: Path, *, repository: str, osmosis: Osmosis) -> None:
    """Make a worktree that is pushed to `bare`, with the rollout that `osmosis rollout init` makes there
    and the two methods of it that a user writes."""
    for folder in LAYOUT:
        (directory / folder).mkdir(parents=True)
        (directory / folder / ".gitkeep").touch()
    git(directory, "init", "-q", "-b", "main")
    git(directory, "remote", "add", "origin", f"https://github.com/{repository}.git")
    git(directory, "init", "-q", "--bare", "-b", "main", str(bare))
    git(directory, "remote", "set-url", "--push", "origin", str(bare))
    osmosis.run("rollout", "init", ROLLOUT)
    fill_in(directory / "rollouts" / ROLLOUT / "main.py")
    (directory / "configs/training/sums.toml").write_text(TRAINING)
    (directory / "data/numbers.jsonl").write_text(rows_of(ROWS))
    push(directory, "the scaffold, filled in")


def fill_in(main: Path) -> None:
    """Write the workflow and the grader into the scaffold of a rollout."""
    text = main.read_text()
    begin = text.index(TODO)
    end = text.index("class MyGrader")
    text = text[:begin] + WORKFLOW + "\n\n" + text[end:]
    text = text.replace(
        "ctx: AgentWorkflowContext) -> None:", "ctx: AgentWorkflowContext) -> list:"
    )
    text = text.replace("        ctx.set_reward(0.0)\n", GRADER)
    text = text.replace("import uvicorn\n", "import httpx\nimport uvicorn\n")
    text = text.replace("import os\n", "import asyncio\nimport os\n")
    text = text.replace(
        "import AgentWorkflowContext, GraderContext",
        "import AgentWorkflowContext, GraderContext, get_rollout_context",
    )
    main.write_text(text)


def push(directory: Path, message: str) -> str:
    """Commit everything and push it. Returns the commit."""
    git(directory, "add", "-A")
    git(directory, "commit", "-q", "--allow-empty", "-m", message)
    git(directory, "push", "-q", "origin", "main")
    return git(directory, "rev-parse", "HEAD")
