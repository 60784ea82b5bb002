"""`headrace eval info`: the figures of an evaluation, and what to know of them."""

import pytest

from tests.unit.producers.cli.conftest import FakeServer, Run

NOTE = "Attempts that failed count as 0, which is more than this mean reward"


@pytest.mark.parametrize(
    ("reward", "failed", "is_told"), [(-0.5, 3.0, True), (-0.5, 0.0, False), (0.5, 3.0, False)]
)
def test_it_says_when_a_policy_that_crashes_scores_better(
    server: FakeServer, headrace: Run, reward: float, failed: float, *, is_told: bool
) -> None:
    metrics = {"eval/reward": reward, "eval/failed": failed, "eval/left_out": 0.0}
    server.answer("GET", "/evals/e", {"eval": {"name": "e", "metrics": metrics}})
    shown = headrace("eval", "info", "e").out.replace("\n", " ")
    assert (NOTE in shown) is is_told
