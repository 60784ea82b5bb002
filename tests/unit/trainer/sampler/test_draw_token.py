"""Random numbers by key and position, and the tokens that are drawn with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from schemas.sampling import DrawKey
from trainer.sampler.counter_rng import CounterRng, prompt_hash
from trainer.sampler.draw_token import _nucleus, draw_exactly, draw_on_device, draw_tokens

KEY = DrawKey(purpose="train", step=3, slot=2, replacement=0, sample=1)


def draws(
    key: DrawKey = KEY, *, seed: int = 7, prompt: str = "p", occurrence: int = 0
) -> CounterRng:
    return CounterRng(key, seed=seed, prompt=prompt, occurrence=occurrence)


def test_a_draw_is_a_function_of_its_position() -> None:
    forward = [draws().uniform_at(i) for i in range(200)]
    one = draws()
    assert [one.uniform_at(i) for i in reversed(range(200))] == forward[::-1]
    assert len(set(forward)) == 200
    assert all(0 <= value < 1 for value in forward)
    assert sum(forward) / 200 == pytest.approx(0.5, abs=0.1)


PINNED = [
    0.15425787329578022,
    0.5468446633575992,
    0.8785078125692805,
    0.26943775029460193,
]


def test_the_numbers_never_change_between_releases() -> None:
    assert [draws().uniform_at(i) for i in (0, 1, 64, 1000)] == PINNED


@pytest.mark.parametrize(
    "other",
    [
        lambda: draws(seed=8),
        lambda: draws(prompt="q"),
        lambda: draws(occurrence=1),
        *(
            lambda field=field, value=value: draws(KEY.model_copy(update={field: value}))
            for field, value in {
                "purpose": "evaluate",
                "step": 4,
                "slot": 3,
                "replacement": 1,
                "sample": 2,
            }.items()
        ),
    ],
)
def test_every_part_of_the_key_counts(other: Callable[[], CounterRng]) -> None:
    assert other().uniform_at(0) != draws().uniform_at(0)


def test_prompts_are_told_apart_by_their_ids() -> None:
    assert prompt_hash((1, 23)) != prompt_hash((12, 3))
    assert prompt_hash([1, 23]) == prompt_hash((1, 23))


def pick(
    logits: list[float], uniform: float, *, temperature: float = 1.0, top_p: float = 1.0
) -> tuple[int, float]:
    tokens, logprobs = draw_tokens(
        torch.tensor([logits]), temperatures=[temperature], top_ps=[top_p], uniforms=[uniform]
    )
    return tokens[0], logprobs[0]


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.24, 0), (0.26, 1), (0.99, 1)])
def test_the_uniform_number_walks_the_cumulative_mass(uniform: float, token: int) -> None:
    drawn, logprob = pick([0.0, 1.0986122886681098], uniform)
    assert drawn == token
    assert logprob == pytest.approx([-1.3862943611, -0.2876820724][token], abs=1e-6)


def test_a_token_without_mass_is_never_drawn() -> None:
    assert pick([float("-inf"), 0.0, float("-inf")], 0.0)[0] == 1
    assert pick([float("-inf"), 0.0, float("-inf")], 1 - 2**-53)[0] == 1


def test_temperature_zero_takes_the_best_and_reports_its_plain_logprob() -> None:
    token, logprob = pick([0.0, 2.0, 1.0], 0.9, temperature=0.0)
    assert token == 1
    expected = torch.tensor([0.0, 2.0, 1.0]).log_softmax(0)[1]
    assert logprob == pytest.approx(float(expected), abs=1e-6)


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().tolist()
    for uniform in (0.0, 0.3, 0.6, 0.99):
        assert pick(logits, uniform, top_p=0.5)[0] == 0
        token, logprob = pick(logits, uniform, top_p=0.6)
        assert token in (0, 1)
        assert logprob == pytest.approx(float(torch.tensor([5 / 8, 3 / 8]).log()[token]), abs=1e-6)


def test_on_a_gpu_rows_with_top_p_change_no_bits_of_the_others() -> None:
    """The same operations on a CPU."""
    generator = torch.Generator().manual_seed(1)
    logits_R_V = 3 * torch.randn(8, 700, generator=generator)
    others: dict[str, Any] = {
        "temperatures": [0.0, 1.0, 0.7, 1.0, 0.3, 1.0, 1.0, 2.0],
        "uniforms": [i / 8 + 0.01 for i in range(8)],
    }
    alone = draw_on_device(logits_R_V, top_ps=[1.0] * 8, **others)
    mixed = draw_on_device(logits_R_V, top_ps=[1.0, 0.5] * 4, **others)
    cut = draw_exactly(logits_R_V, top_ps=[0.5] * 8, **others)
    assert alone != cut
    for part in range(2):
        assert mixed[part][::2] == alone[part][::2]
        assert mixed[part][1::2] == cut[part][1::2]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (0.0, 1.0), (0.7, 1.3), (0.7, 0.0)])
def test_draws_have_the_bits_of_the_written_formula(
    temperatures: tuple[float, float], top_p: float
) -> None:
    """Every step by itself: the shortcuts change neither a token nor a bit of its logprob."""
    generator = torch.Generator().manual_seed(2)
    logits_R_V = 4 * torch.randn(16, 5000, generator=generator)
    by_row = [*temperatures] * 8
    uniforms = torch.rand(16, generator=generator, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    divisors_R = torch.tensor([t or 1.0 for t in by_row], dtype=torch.float64)
    logprobs_R_V = (logits_R_V.double() / divisors_R[:, None]).log_softmax(-1)
    if top_p < 1:
        logprobs_R_V = _nucleus(logprobs_R_V, torch.full((16,), top_p, dtype=torch.float64))
    mass_R_V = logprobs_R_V.exp().cumsum(-1)
    token_R = (mass_R_V <= (uniforms * mass_R_V[:, -1])[:, None]).sum(-1).clamp(max=4999)
    greedy_R = torch.tensor([t == 0 for t in by_row])
    token_R = logprobs_R_V.argmax(-1).where(greedy_R, token_R)
    chosen_R = logprobs_R_V.gather(-1, token_R[:, None])[:, 0]
    drawn = draw_exactly(
        logits_R_V, temperatures=by_row, top_ps=[top_p] * 16, uniforms=uniforms.tolist()
    )
    assert drawn == (token_R.tolist(), chosen_R.tolist())
