"""kill -9 while a run of every objective trains, all of them side by side: the weights are those of
undisturbed runs, and the logs rebuild them."""

from collections.abc import Mapping

from tests.chaos.trials import verified
from tests.kit.kills import Points, Stage
from tests.kit.ledger import check
from tests.kit.objectives import PREFERENCES, RUNS
from tests.kit.platform import TINY, Platform, final_adapter, run_config
from tests.kit.preference_rows import pairs, singles

STEPS = 2
POINTS: Points = {
    "rollout.perform.GenerateSample.effect_done": 60,
    "grade.perform.GradeGroup.effect_done": 20,
    "learn.perform.TrainStep.claimed": 12,
    "learn.perform.TrainStep.effect_done": 9,
    "learn.perform.TrainStep.tx_before_commit": 7,
}
"""Hits count from the start of a process."""

FILES = {
    "rollouts/say/main.py": '''
from headrace import AgentWorkflow, reward


class Team(AgentWorkflow):
    """Two agents with a turn each, whose turns and answers are paid too."""

    async def run(self, ctx):
        draft = await ctx.chat(ctx.prompt, max_tokens=3)
        ctx.set_turn_agent(0, "writer")
        ctx.set_turn_reward(0, float(len(draft["content"])))
        review = await ctx.chat([*ctx.prompt, draft], max_tokens=3)
        ctx.set_turn_agent(1, "critic")
        ctx.set_agent_reward("critic", float(len(review["content"])))
        return [*ctx.prompt, draft, review]


@reward
def digits(solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(character.isdigit() for character in solution_str) / 8


@reward
def brief(solution_str, ground_truth, extra_info=None, **kwargs):
    return -float(len(solution_str))
'''
}
PARTS = [{"name": "digits", "weight": 1.0}, {"name": "brief", "weight": 0.25}]
SAMPLED: Mapping[str, Mapping[str, object]] = {
    **RUNS,
    "gdpo": {"algorithm": "gdpo", "rewards": PARTS},
    "rewards of turns": {"turn_reward_coef": 0.5},
    "agents": {"agent_advantages": True},
}

REPLACING = ("dapo", "curriculum")
"""Those that put another group in the place of one that teaches nothing."""


def act(stage: Stage) -> dict[str, str]:
    """The hash of the weights of each run."""
    with stage.platform(files=FILES) as running:
        running.upload("pairs", pairs(range(10, 26)))
        running.upload("singles", singles(range(10, 26)))
        started = {name: _submit_sampled(running, name) for name in SAMPLED}
        started |= {name: _submit_preferences(running, name) for name in PREFERENCES}
        found = {}
        for name, run in started.items():
            info = running.wait(run, "finished", within_s=600)
            if name in SAMPLED and name not in REPLACING:
                check(running.events(run), steps=STEPS, groups=2, samples=4)
            verified(running, run)
            found[name] = final_adapter(info)
        return found


def _submit_sampled(running: Platform, name: str) -> str:
    advanced = {"rewards": PARTS, **SAMPLED[name], "max_steps": STEPS, "state_interval": 2}
    return running.submit(run_config(advanced=advanced), workspace="w")


def _submit_preferences(running: Platform, name: str) -> str:
    config = {
        "experiment": {"model_path": TINY, "dataset": "singles" if name == "kto" else "pairs"},
        "training": {"lr": 1e-3},
        "advanced": {
            **PREFERENCES[name],
            "batch_size": 4,
            "max_steps": STEPS,
            "state_interval": 2,
            "deterministic": True,
        },
    }
    return running.submit(config)
