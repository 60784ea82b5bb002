"""A taskset of the package `verifiers`, with a tool and its own reward."""

import re

import verifiers.v1 as vf

__all__ = ["MultiplyTaskset"]


class MultiplyData(vf.TaskData):
    """A task. Each row of the dataset holds one of them, as `metadata.task`."""

    answer: int


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    """The tools of all tasks. They run in one process."""

    TOOL_PREFIX = None

    @vf.tool
    def multiply(self, a: int, b: int) -> int:
        """Multiply two whole numbers."""
        return a * b


class MultiplyTask(vf.Task[MultiplyData]):
    """A task with its reward: 1 if the last number of the answer is right, else 0."""

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        numbers = re.findall(r"-?\d+", trace.last_reply)
        return float(numbers[-1:] == [str(self.data.answer)])


class MultiplyConfig(vf.TasksetConfig):
    """The settings of the taskset."""

    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class MultiplyTaskset(vf.Taskset[MultiplyTask, MultiplyConfig]):
    """All tasks."""

    @classmethod
    def toolsets(cls, config: MultiplyConfig) -> list[vf.Toolset]:
        return [Calculator(config.tools)]

    def load(self) -> list[MultiplyTask]:
        return [
            MultiplyTask(MultiplyData(prompt=f"{a} * {b}?", answer=a * b), self.config.task)
            for a in range(2, 10)
            for b in range(2, 10)
        ]


if __name__ == "__main__":
    Calculator.run()
