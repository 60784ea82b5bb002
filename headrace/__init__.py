"""The SDK that a workspace's rollouts import: nothing but the standard library."""

from headrace.grading import Grader, GraderContext, Sample
from headrace.legacy import osmosis_reward, osmosis_rubric
from headrace.rewards import reward
from headrace.rubrics import rubric
from headrace.tools.function_tool import tool
from headrace.workflow import AgentWorkflow, WorkflowContext

__all__ = [
    "AgentWorkflow",
    "Grader",
    "GraderContext",
    "Sample",
    "WorkflowContext",
    "osmosis_reward",
    "osmosis_rubric",
    "reward",
    "rubric",
    "tool",
]
