"""The losses of pairs by hand, where other trainers went wrong."""

import math
from typing import Any

import pytest
import torch

from schemas.config import Advanced
from trainer.preferences.objective import AnswerScores
from trainer.preferences.registry import PREFERENCE_OBJECTIVES, settings_of


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


LONG = AnswerScores(
    logprob_A=floats(-4.0, -6.0),
    reference_A=floats(-8.0, -5.0),
    length_A=floats(4.0, 2.0),
    is_chosen_A=torch.tensor([True, False]),
    baseline=0.5,
    score_A=floats(1.5, -1.0),
    margin_U=floats(0.5),
)
"""The chosen answer has gained 4 over four tokens, the rejected one has lost 1 over two. A head says
that the chosen one is better by 2.5, and it should be by 0.5."""


def log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value))


def log_odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


EXPECTED: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    "dpo": ({"algorithm": "dpo", "beta": 0.2}, [-log_sigmoid(1.0)], [0.8, -0.2]),
    "sigmoid_norm": (
        {"algorithm": "dpo", "beta": 0.2, "preference_loss": "sigmoid_norm"},
        [-log_sigmoid(0.2 * 1.5)],
        [0.2, -0.1],
    ),
    "ipo": (
        {"algorithm": "dpo", "beta": 0.2, "preference_loss": "ipo"},
        [(1.5 - 2.5) ** 2],
        [0.2, -0.1],
    ),
    "hinge": ({"algorithm": "dpo", "beta": 0.1, "preference_loss": "hinge"}, [0.5], [0.4, -0.1]),
    "smoothed": (
        {"algorithm": "dpo", "beta": 0.2, "label_smoothing": 0.25},
        [-0.75 * log_sigmoid(1.0) - 0.25 * log_sigmoid(-1.0)],
        [0.8, -0.2],
    ),
    "kto": (
        {"algorithm": "kto", "beta": 0.2, "desirable_weight": 2.0, "undesirable_weight": 3.0},
        [2 * (1 - 1 / (1 + math.exp(-0.7))), 3 * (1 - 1 / (1 + math.exp(-0.3)))],
        [0.8, -0.2],
    ),
    "orpo": (
        {"algorithm": "orpo", "beta": 0.2},
        [1.0 - 0.2 * log_sigmoid(log_odds(-1.0) - log_odds(-3.0))],
        [-0.2, -0.6],
    ),
    "simpo": (
        {"algorithm": "simpo", "beta": 2.0, "simpo_gamma": 1.5},
        [-log_sigmoid(2.0 * 2.0 - 1.5)],
        [-2.0, -6.0],
    ),
    "reward_model": ({"algorithm": "reward_model"}, [-log_sigmoid(2.0)], [1.5, -1.0]),
    "centred": (
        {"algorithm": "reward_model", "center_rewards_coefficient": 0.1},
        [-log_sigmoid(2.0) + 0.1 * 0.5**2],
        [1.5, -1.0],
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_loss_is_that_of_its_formula(name: str) -> None:
    advanced, losses, rewards = EXPECTED[name]
    chosen = Advanced(**advanced)
    found, reward_A = PREFERENCE_OBJECTIVES[chosen.algorithm].loss(LONG, settings_of(chosen))
    assert found.tolist() == pytest.approx(losses, abs=1e-12)
    assert reward_A.tolist() == pytest.approx(rewards, abs=1e-12)


def test_a_certain_answer_has_finite_odds() -> None:
    sure = AnswerScores(floats(0.0, -3.0), floats(0, 0), floats(1, 1), torch.tensor([True, False]))
    loss_U, _ = PREFERENCE_OBJECTIVES["orpo"].loss(sure, settings_of(Advanced(algorithm="orpo")))
    assert torch.isfinite(loss_U).all()


def test_defaults_are_those_of_the_papers() -> None:
    betas = {"dpo": 0.1, "online_dpo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
    for algorithm, objective in PREFERENCE_OBJECTIVES.items():
        assert objective.has_head or objective.defaults.beta == betas[algorithm]
    assert PREFERENCE_OBJECTIVES["reward_model"].defaults.center_rewards_coefficient == 0.0
    assert PREFERENCE_OBJECTIVES["simpo"].defaults.simpo_gamma == 0.5
