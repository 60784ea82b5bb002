"""The rewards of single turns of an attempt, which a workflow sets while it runs."""

from collections.abc import Mapping

MOST_TURNS = 256
"""How many model calls one attempt may make."""
LARGEST_REWARD = 1e6


def check_turn(turn: object) -> None:
    """Raises TypeError or ValueError unless this is the number of a turn."""
    if isinstance(turn, bool) or not isinstance(turn, int):
        kind = type(turn).__name__
        raise TypeError(f"the turn is {kind}; give its number, 0 for the first answer")
    if not 0 <= turn < MOST_TURNS:
        raise ValueError(
            f"the turn is {turn}; give a number from 0, the first answer, to {MOST_TURNS - 1}"
        )


def check_reward(value: object, *, whose: str) -> None:
    """Raises TypeError or ValueError unless this is a reward."""
    if not isinstance(value, int | float):
        kind = type(value).__name__
        raise TypeError(f"the reward of {whose} is {kind}; give a number")
    if not abs(value) <= LARGEST_REWARD:  # not NaN either
        raise ValueError(
            f"the reward of {whose} is {value}; give a finite number from "
            f"{-LARGEST_REWARD:,.0f} to {LARGEST_REWARD:,.0f}"
        )


class TurnRewards:
    """Turn -> its reward. Turns count from 0, in the order of their requests to the policy."""

    def __init__(self) -> None:
        self._found: dict[int, float] = {}
        self._has_ended = False

    def set(self, turn: int, value: float) -> None:
        """Set the reward of a turn, in place of an earlier one. Raises TypeError and ValueError for
        arguments that cannot be used, RuntimeError after the attempt."""
        if self._has_ended:
            raise RuntimeError(
                "the attempt has ended; call ctx.set_turn_reward before `run` returns"
            )
        check_turn(turn)
        check_reward(value, whose=f"turn {turn}")
        self._found[int(turn)] = float(value)

    def end(self) -> Mapping[int, float]:
        """Return the rewards by turn. No reward can be set afterwards."""
        self._has_ended = True
        return dict(sorted(self._found.items()))
