"""Advantages of single agents (Dr. MAS, arXiv 2602.08847).

    A_t = the algorithm's advantage of R_i + r_ia, among the samples of the group in which agent a acted

for the actions t of agent a in sample i. R_i is the reward of the sample, and r_ia the own reward that
the workflow gave to the agent there, or 0. Turns without an agent are those of one more agent.

Where trainers differ, we decided:
- A sample counts once in the mean and the deviation of an agent, however often the agent acted in it.
  The paper counts each of its turns.
- The function is the algorithm's own (`advantages`), and a KL in the reward is that of the agent's own
  actions.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from schemas.learner import GradedGroup
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import BatchBeforeUpdate
from trainer.objective.turns import spread_turns


def with_agents(
    before: BatchBeforeUpdate, groups: Sequence[GradedGroup], hyperparameters: Hyperparameters
) -> BatchBeforeUpdate:
    """The batch with each agent of a sample as a sample of its own, and the samples of a group in which
    it acts as a group of their own, if the run compares agents. Raises CorruptData when the turns of a
    sample are not those of its rows."""
    if not hyperparameters.agent_advantages:
        return before
    teams: dict[tuple[int, str | None], int] = {}
    group_S: list[int] = []
    reward_S: list[float | None] = []
    member_of_actions: list[int] = []
    samples = [(n, sample) for n, group in enumerate(groups) for sample in group.samples]
    for (group, sample), reward in zip(samples, before.reward_S, strict=True):
        agents: dict[str | None, int] = {}
        acting = [turn.agent for turn in sample.turns] or [None]
        for agent in acting:
            if agent in agents:
                continue
            agents[agent] = len(group_S)
            group_S.append(teams.setdefault((group, agent), len(teams)))
            own = 0.0 if agent is None else sample.agent_rewards.get(agent, 0.0)
            reward_S.append(None if reward is None else reward + own)
        places = [agents[agent] for agent in acting]
        member_of_actions += spread_turns(sample, places, default=places[0])
    return replace(
        before,
        group_S=group_S,
        reward_S=reward_S,
        sample_E=torch.tensor(member_of_actions, dtype=torch.long),
    )
