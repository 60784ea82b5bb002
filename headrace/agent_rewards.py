"""The agents of an attempt: which turns are whose, and their own rewards."""

import re
from collections.abc import Mapping

from headrace.turn_rewards import check_reward, check_turn

MOST_AGENTS = 64
AGENT_NAME = r"^[A-Za-z_][A-Za-z0-9_-]{0,62}$"


class AgentRewards:
    """Turn -> the agent that answered, and agent -> its own reward."""

    def __init__(self) -> None:
        self._turns: dict[int, str] = {}
        self._rewards: dict[str, float] = {}
        self._has_ended = False

    def set_turn(self, turn: int, agent: str) -> None:
        """Say which agent answered a turn, in place of what was said before. Raises TypeError and
        ValueError for arguments that cannot be used, RuntimeError after the attempt."""
        self._check(agent, call="set_turn_agent")
        check_turn(turn)
        self._turns[int(turn)] = agent

    def set_reward(self, agent: str, value: float) -> None:
        """Set the own reward of an agent, in place of an earlier one. Raises like `set_turn`."""
        self._check(agent, call="set_agent_reward")
        check_reward(value, whose=f"agent {agent!r}")
        self._rewards[agent] = float(value)

    def _check(self, agent: str, *, call: str) -> None:
        if self._has_ended:
            raise RuntimeError(f"the attempt has ended; call ctx.{call} before `run` returns")
        if not isinstance(agent, str):
            raise TypeError(f"the agent is {type(agent).__name__}; give its name")
        if re.fullmatch(AGENT_NAME, agent) is None:
            raise ValueError(
                f"the agent is {agent[:80]!r}; give a name of up to 63 letters, digits, _ and -, which "
                "begins with a letter or _"
            )
        known = {*self._turns.values(), *self._rewards}
        if agent not in known and len(known) == MOST_AGENTS:
            raise ValueError(f"agent {agent!r} is one too many; name at most {MOST_AGENTS} agents")

    def end(self) -> tuple[Mapping[int, str], Mapping[str, float]]:
        """Return the agents by turn, and the rewards by agent. Nothing can be set afterwards."""
        self._has_ended = True
        return dict(sorted(self._turns.items())), dict(sorted(self._rewards.items()))
