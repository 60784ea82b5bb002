"""The steps of the demo: data, demonstrations, a first measurement, reinforcement learning, and a second
measurement.

The demo uses the platform as a user would: with a connected git repository, uploaded datasets, the TOMLs
of the example, and runs and evaluations over HTTP. A `git push` starts the reinforcement learning.
"""

import sys
from pathlib import Path

from producers.cli import watch
from producers.cli.client import Client, path_segment
from producers.cli.commands import submit
from producers.cli.commands.dataset import upload_file
from producers.cli.commands.evaluations import evaluation
from producers.cli.config_files import read_config
from producers.cli.demo.chaos import Killer, killing
from producers.cli.demo.push import GitServer, commit_on_branch, trigger_table
from producers.cli.display.output import Document, console, say
from producers.cli.display.run_view import RunView
from producers.cli.errors import Failure
from producers.cli.scaffold import commit, scaffold

SFT, GRPO = "arithmetic-sft", "arithmetic-grpo"
KILLED = "arithmetic-grpo-killed"
DATASETS = {"sft": SFT, "rl": "arithmetic-rl", "heldout": "arithmetic-heldout"}
GRPO_TOML = "configs/training/grpo.toml"
STEPS_PER_EPOCH = 100

RANDOM_GRADER = '''"""A control experiment: random rewards, so that nothing can be learned."""

import random

from headrace import AgentWorkflow, Grader


class Solve(AgentWorkflow):
    async def run(self, ctx):
        return [*ctx.prompt, await ctx.chat(ctx.prompt)]


class RandomReward(Grader):
    async def grade(self, ctx):
        for name in ctx.samples:
            ctx.set_sample_reward(name, float(random.random() < 0.5))
'''

NEAR_MISSES = "near-misses"
"""The branch of the demo's workspace whose grader also pays for near misses."""

ROLLOUT = "rollouts/arithmetic/main.py"
EXACT = "            ctx.set_sample_reward(name, float(bool(equals) and answer == ctx.label))\n"
NEAR = """\
            is_number = bool(equals) and answer.isdecimal() and len(answer) < 10
            distance = abs(int(answer) - int(ctx.label)) if is_number else None
            ctx.set_sample_reward(name, 0.0 if distance is None else 1 / (1 + distance))
"""


class Story:
    """Runs the demo once, against one platform."""

    def __init__(
        self, client: Client, workspace: Path, *, home: Path, quiet: bool, mark: str = ""
    ) -> None:
        """`mark` makes the names of this demo unique on a server that may have run another."""
        self._client = client
        self._mark = mark
        self._home = home
        self._root = workspace
        self._quiet = quiet
        self._workspace = ""
        self._git_server = GitServer(client, workspace, name=self._own_name("arithmetic"))

    def tell(self, *, seed: int, steps: int, random_reward: bool, chaos: bool = False) -> Document:
        """Run the whole demo and return its measurements. `chaos` repeats the reinforcement learning
        while workers are killed. Raises Failure when a run does not finish."""
        self._prepare(seed, random_reward=random_reward)
        sft = self._train(self._sft(seed), self._own_name(SFT))
        before = self._measure(f"{self._own_name(SFT)}@last", "before", seed)
        overrides = self._grpo_overrides(seed, steps, random_reward=random_reward)
        grpo, pushed = self._train_by_push(overrides, self._own_name(GRPO))
        after = self._measure(f"{self._own_name(GRPO)}@last", "after", seed)
        info = self._client.get(f"/runs/{path_segment(self._own_name(GRPO))}")
        config = self._grpo(overrides)
        with_kills = {"chaos": self._train_under_chaos(config, seed, info)} if chaos else {}
        return {
            "held_out": {"before": before, "after": after},
            "steps": grpo.step,
            "sft_steps": sft.step,
            "seed": seed,
            "run": info["run"]["id"],
            "checkpoints": info["checkpoints"],
            "push": pushed,
            **with_kills,
        }

    def _train_under_chaos(self, config: Document, seed: int, calm: Document) -> Document:
        """Train the same run while its workers are killed; returns the final hashes of both runs."""
        name = self._own_name(KILLED)
        submitted = self._submit(config, name)
        killer = Killer(self._home, self._client, str(submitted["id"]), seed=seed, say=self._say)
        with killing(killer):
            self._watch(submitted, name)
        killed = self._client.get(f"/runs/{path_segment(name)}")
        return {
            "run": killed["run"]["id"],
            "kills": len(killer.deaths),
            "undisturbed_sha256": calm["checkpoints"][-1]["adapter_sha256"],
            "killed_sha256": killed["checkpoints"][-1]["adapter_sha256"],
        }

    def _prepare(self, seed: int, *, random_reward: bool) -> None:
        self._say(
            "Making a workspace from the example (a git repository) and uploading three datasets."
        )
        scaffold(self._root, seed=seed)
        if random_reward:
            (self._root / "rollouts" / "arithmetic" / "random_reward.py").write_text(RANDOM_GRADER)
            commit(self._root, "Reward at random")
        source = (self._root / ROLLOUT).read_text()
        near = source.replace(EXACT, NEAR)
        commit_on_branch(self._root, NEAR_MISSES, ROLLOUT, near, "Pay for near misses too")
        self._git_server.connect()
        self._workspace = self._git_server.workspace
        for name in DATASETS.values():
            path = self._root / "data" / f"{name}.jsonl"
            upload_file(self._client, path, self._own_name(name), quiet=True)

    def _own_name(self, name: str) -> str:
        return f"{name}-{self._mark}" if self._mark else name

    def _sft(self, seed: int) -> Document:
        config = read_config(self._root / "configs" / "training" / "sft.toml")
        config["advanced"]["seed"] = seed
        config["experiment"]["dataset"] = self._own_name(SFT)
        return config

    def _grpo_overrides(self, seed: int, steps: int, *, random_reward: bool) -> Document:
        """The values that this demo sets in the example's TOML, by their keys."""
        overrides: Document = {
            "advanced.seed": seed,
            "advanced.max_steps": steps,
            "advanced.validation_dataset": self._own_name(DATASETS["heldout"]),
            "experiment.dataset": self._own_name(DATASETS["rl"]),
            "experiment.model_path": f"{self._own_name(SFT)}@last",
            "training.total_epochs": -(-steps // STEPS_PER_EPOCH),
        }
        return overrides | ({"experiment.entrypoint": "random_reward.py"} if random_reward else {})

    def _grpo(self, overrides: Document) -> Document:
        config = read_config(self._root / GRPO_TOML)
        for key, value in overrides.items():
            section, _, name = key.partition(".")
            config[section][name] = value
        return config

    def _train_by_push(self, overrides: Document, name: str) -> tuple[RunView, Document]:
        """Push a commit whose `headrace.toml` starts the run, and follow it to the status of the
        commit."""
        table = trigger_table(config=GRPO_TOML, name=name, overrides=overrides)
        (self._root / "headrace.toml").write_text(table)
        self._say(f"git push: {overrides['experiment.model_path']} -> {name}")
        said = self._git_server.push("Train on every push to main")
        if said:
            self._say(said)
        delivery = self._git_server.wait_for_run()
        run = delivery["runs"][0]
        self._say(
            f"commit {delivery['after'][:12]} is synced; trigger {run['config']} matches; run {name}"
        )
        view = self._watch({"id": run["run"]}, name)
        final = self._git_server.wait_for_status(self._say)
        pushed = {
            "commit": delivery["after"],
            "event": delivery["event"],
            "status": {"state": final["commit_state"], "text": final["commit_text"]},
        }
        return view, pushed

    def _train(self, config: Document, name: str) -> RunView:
        return self._watch(self._submit(config, name), name)

    def _submit(self, config: Document, name: str) -> Document:
        algorithm = str(config["advanced"]["algorithm"]).upper()
        self._say(f"{algorithm}: {config['experiment']['model_path']} -> {name}")
        submitted: Document = submit.submit_run(
            self._client, config, workspace=self._workspace, name=name
        )["run"]
        return submitted

    def _watch(self, submitted: Document, name: str) -> RunView:
        view = watch.follow_run(self._client, str(submitted["id"]), name, quiet=self._quiet)
        watch.check_result(view, name)
        if view.status != "finished":
            raise Failure(
                "STOPPED", f"the run {name} was stopped at step {view.step}; start the demo again"
            )
        return view

    def _measure(self, model: str, when: str, seed: int) -> dict[str, float]:
        return {how: self._evaluate(how, model, when, seed) for how in ("greedy", "sampled")}

    def _evaluate(self, how: str, model: str, when: str, seed: int) -> float:
        config = read_config(self._root / "configs" / "eval" / f"{how}.toml")
        config["experiment"] |= {
            "model_path": model,
            "dataset": self._own_name(DATASETS["heldout"]),
        }
        config["advanced"]["seed"] = seed
        name = self._own_name(f"heldout-{when}-{how}")
        answer = evaluation.submit_evaluation(
            self._client, config, workspace=self._workspace, name=name
        )
        started = answer["eval"]
        evaluated = evaluation.watch_evaluation(self._client, started, quiet=self._quiet)
        if evaluated["status"] != "finished" or evaluated.get("reward") is None:
            raise Failure(
                "EVAL_FAILED", f"the evaluation {name} {evaluated['status']}: {evaluated['error']}"
            )
        self._say(f"Held-out reward {when}, {how}: {evaluated['reward']:.3f}")
        return float(evaluated["reward"])

    def _say(self, text: str) -> None:
        if self._quiet:
            return
        if sys.stdout.isatty():
            console().rule(text, align="left")
        else:
            say(text)
