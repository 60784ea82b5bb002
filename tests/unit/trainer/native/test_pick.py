"""Tokens that are picked in C against the exact running sum: the same ones, or none."""

from collections.abc import Iterator

import pytest
import torch

from tests.kit.postgres import missing
from trainer.device_thread import limit_threads
from trainer.native import pick as picking
from trainer.native.pick import MANY_LOGPROBS, NEAR, pick
from trainer.sampler import draw_token
from trainer.sampler.draw_token import draw_exactly, pick_exactly

LARGE = 49152


@pytest.fixture(autouse=True)
def compiler() -> None:
    if picking._c_function() is None:
        missing("no C compiler (apt-get install gcc libc6-dev): tokens are picked by the exact sum")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with limit_threads(request.param):
        yield request.param


def logprobs(rows: int, vocabulary: int, *, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * spread
    return logits.log_softmax(dim=-1)


def uniforms(rows: int, seed: int) -> torch.Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 200.0])
@pytest.mark.parametrize("vocabulary", [LARGE, 40007])
def test_a_picked_token_is_that_of_the_exact_sum(vocabulary: int, spread: float) -> None:
    """For even and for sharp distributions, whose masses underflow, and where the vocabulary does not
    end with a vector."""
    given = logprobs(8, vocabulary, spread=spread)
    mass = given.exp().cumsum(-1)
    for seed in range(12):
        uniform = uniforms(8, seed)
        found = pick(given, uniform)
        assert found is not None
        assert torch.equal(found, (mass <= uniform[:, None] * mass[:, -1:]).sum(-1))
        assert torch.equal(found, pick_exactly(given, uniform))


def test_a_share_next_to_a_border_is_left_to_the_exact_sum() -> None:
    """One row is enough. The shares on both sides of the border, at ten times that distance, are picked
    in C and differ."""
    given = logprobs(8, LARGE, spread=1.0)
    mass = given.exp().cumsum(-1)
    uniform = uniforms(8, 0)
    for token in (0, 31, 511, 512, LARGE - 2):
        border = float(mass[3, token] / mass[3, -1])
        for nudge in (-NEAR / 2, 0.0, NEAR / 2):
            uniform[3] = border + nudge
            assert pick(given, uniform) is None
        for nudge, expected in ((-10 * NEAR, token), (10 * NEAR, token + 1)):
            uniform[3] = border + nudge
            found = pick(given, uniform)
            assert found is not None
            assert int(found[3]) == expected
    uniform[3] = 0.0
    assert pick(given, uniform) is not None
    given[3, 0] = -torch.inf
    assert pick(given, uniform) is None, "its first token has no mass"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logprobs_that_are_not_finite_are_left_to_the_exact_sum(value: float) -> None:
    given = logprobs(8, LARGE, spread=1.0)
    given[2] = value
    assert pick(given, uniforms(8, 0)) is None


def test_forbidden_tokens_are_never_picked() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, LARGE, generator=generator, dtype=torch.float64)
    logits[:, torch.randperm(LARGE, generator=generator)[100:]] = -torch.inf
    given = logits.log_softmax(-1)
    for seed in range(20):
        found = pick(given, uniforms(8, seed))
        assert found is not None
        assert torch.equal(found, pick_exactly(given, uniforms(8, seed)))
        assert bool(given.gather(-1, found[:, None]).isfinite().all())


def test_few_logprobs_and_other_types_are_left_to_the_exact_sum() -> None:
    rows = MANY_LOGPROBS // LARGE
    assert pick(logprobs(rows, LARGE, spread=1.0), uniforms(rows, 0)) is None
    given = logprobs(8, LARGE, spread=1.0)
    assert pick(given.float(), uniforms(8, 0)) is None
    assert pick(given.t().contiguous().t(), uniforms(8, 0)) is None


def test_draws_are_the_same_without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and logprobs, at several temperatures and with a greedy row. Twin: a picked token is the
    one that is drawn."""
    logits = torch.randn(8, LARGE, generator=torch.Generator().manual_seed(5))
    drawn = {
        "temperatures": [1.0, 0.7, 0.0, 1.0, 1.3, 1.0, 1.0, 1.0],
        "top_ps": [1.0] * 8,
        "uniforms": uniforms(8, 9).tolist(),
    }
    found = draw_exactly(logits, **drawn)
    monkeypatch.setattr(draw_token, "pick", lambda *_: None)
    assert draw_exactly(logits, **drawn) == found
    monkeypatch.setattr(draw_token, "pick", lambda logprobs, _: torch.full((len(logprobs),), 7))
    assert draw_exactly(logits, **drawn)[0] == [7, 7, found[0][2], *[7] * 5]
