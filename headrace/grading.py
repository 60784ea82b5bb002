"""Graders: how the attempts at a dataset row get their rewards."""

import sys
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """One attempt: its final text, and the whole conversation. `branches` are all its conversations that
    no later request to the policy continues, in the order of their requests; there is one unless the
    workflow asked several times from one point or ran several conversations. `truncated` says whether
    an answer of the policy was cut off at a limit of tokens. `failure` is the category of the failure
    (`agent_error`, `timeout` or `prompt_too_long`) of an attempt that failed, and None of all others;
    graders get attempts that failed only if the run sets `advanced.failed_reward = "grade"`."""

    name: str
    index: int
    text: str
    messages: list[dict[str, object]]
    branches: list[list[dict[str, object]]] = field(default_factory=list)
    truncated: bool = False
    failure: str | None = None


@dataclass
class GraderContext:
    """The input of a grader. `samples` maps names to attempts; `label` is the ground truth."""

    label: str | None
    metadata: dict[str, object]
    samples: dict[str, Sample]
    rewards: dict[str, object] = field(default_factory=dict)
    _places: dict[str, tuple[str, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def set_sample_reward(self, name: str, value: float) -> None:
        """Set the reward of a sample. A sample without a reward, or whose reward is not a finite number,
        is left out of training. Raises KeyError for a name that is not in `samples`."""
        if name not in self.samples:
            raise KeyError(f"there is no sample {name!r}; there are: {', '.join(self.samples)}")
        self.rewards[name] = value
        self._places[name] = _caller()

    def set_reward(self, value: float) -> None:
        """Set the reward of the only sample. Raises ValueError when there are several."""
        if len(self.samples) != 1:
            raise ValueError(
                f"there are {len(self.samples)} samples; use set_sample_reward(name, value)"
            )
        self.set_sample_reward(next(iter(self.samples)), value)


def _caller() -> tuple[str, int]:
    """Return the file and the line of the call into this module."""
    frame = sys._getframe(1)
    while frame.f_globals is globals() and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def place_of_reward(context: GraderContext, name: str) -> tuple[str, int] | None:
    """Return the file and the line where the reward of a sample was set, or None if that is not
    known."""
    return context._places.get(name)


class Grader:
    """Subclass it once per entry point and write `grade`."""

    async def grade(self, ctx: GraderContext) -> None:
        """Set a reward for every sample of `ctx.samples`."""
        raise NotImplementedError("write `async def grade(self, ctx)`")
