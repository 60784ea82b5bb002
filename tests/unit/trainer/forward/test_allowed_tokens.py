"""Logprobs over the tokens that a grammar allows, against a softmax over these tokens alone."""

import pytest
import torch

from trainer.forward.allowed_tokens import AllowedTokens, allowed_tokens
from trainer.forward.logprobs import chosen_logprobs, likeliest_tokens
from trainer.sampler.draw_token import draw_tokens
from trainer.sampler.draw_token_gpu import draw_on_gpu

VOCABULARY, HIDDEN, ACTIONS = 19, 5, 8
TEMPERATURE = 0.7


def mask_of(allowed: list[int]) -> bytes:
    bits = bytearray(3)
    for token in allowed:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


ALLOWED = [[0, 3, 18], [7], None, [1, 2, 7, 8], None, [0, 3, 18], [16, 17], [4, 5]]
TARGETS = [3, 7, 11, 8, 0, 18, 16, 5]


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AllowedTokens]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((ACTIONS, HIDDEN), (VOCABULARY, HIDDEN))
    hidden, head = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )
    found = allowed_tokens([None if one is None else mask_of(one) for one in ALLOWED])
    assert found is not None
    return hidden, head, torch.tensor(TARGETS), found


def by_hand(
    hidden: torch.Tensor, head: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The logprob of each target and the entropy, from a softmax over the allowed tokens alone."""
    logprobs, entropies = [], []
    for row, allowed, target in zip(hidden, ALLOWED, TARGETS, strict=True):
        tokens = list(range(VOCABULARY)) if allowed is None else allowed
        own = (head[tokens] @ row / TEMPERATURE).log_softmax(dim=-1)
        logprobs.append(own[tokens.index(target)])
        entropies.append(-(own.exp() * own).sum())
    return logprobs, entropies


@pytest.mark.parametrize("chunk_elements", [VOCABULARY, 3 * VOCABULARY, 1 << 20])
@pytest.mark.parametrize("trains_entropy", [False, True])
def test_values_and_gradients_are_those_of_the_allowed_tokens_alone(
    chunk_elements: int, trains_entropy: bool
) -> None:
    hidden, head, target, allowed = case()
    weights = torch.linspace(-1, 2, ACTIONS, dtype=torch.float64)
    bonus = weights.flip(0) if trains_entropy else weights * 0
    logprobs, entropies = chosen_logprobs(
        hidden,
        head,
        target,
        temperature=TEMPERATURE,
        chunk_elements=chunk_elements,
        trains_entropy=trains_entropy,
        allowed=allowed,
    )
    loss = (weights * logprobs).sum() + ((bonus * entropies).sum() if trains_entropy else 0)
    grads = torch.autograd.grad(loss, (hidden, head))
    expected_logprobs, expected_entropies = map(torch.stack, by_hand(hidden, head))
    expected_loss = (weights * expected_logprobs).sum() + (bonus * expected_entropies).sum()
    expected_grads = torch.autograd.grad(expected_loss, (hidden, head))
    for found, expected in zip(
        (logprobs, entropies, *grads),
        (expected_logprobs, expected_entropies, *expected_grads),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_rows_without_a_mask_keep_their_bits() -> None:
    hidden, head, target, allowed = case()
    found, _ = chosen_logprobs(hidden, head, target, temperature=TEMPERATURE, allowed=allowed)
    plain, _ = chosen_logprobs(hidden, head, target, temperature=TEMPERATURE)
    free = [number for number, one in enumerate(ALLOWED) if one is None]
    assert torch.equal(found[free], plain[free])
    assert not torch.equal(found, plain)


def test_the_likeliest_tokens_are_allowed_ones() -> None:
    hidden, head, _, allowed = case()
    ids, logprobs = likeliest_tokens(
        hidden.detach(), head.detach(), temperature=TEMPERATURE, most=2, allowed=allowed
    )
    for row, own, tokens in zip(ids.tolist(), logprobs.tolist(), ALLOWED, strict=True):
        known = [t for t, logprob in zip(row, own, strict=True) if logprob > -1e29]
        assert tokens is None or (set(known) <= set(tokens) and len(known) == min(2, len(tokens)))


@pytest.mark.parametrize("temperature", [0.0, 1e-6, TEMPERATURE])
def test_draws_are_of_allowed_tokens_at_their_logprob(temperature: float) -> None:
    """Also where the number is the largest, and on the path of a GPU."""
    hidden, head, _, allowed = case()
    logits = (hidden @ head.T).detach()
    masks = [None if one is None else mask_of(one) for one in ALLOWED]
    for uniform in (0.0, 0.4, 1 - 2**-53):
        options = {"temperatures": [temperature] * ACTIONS, "uniforms": [uniform] * ACTIONS}
        tokens, logprobs = draw_tokens(logits, **options, top_ps=[1.0] * ACTIONS, masks=masks)
        on_gpu, _ = draw_on_gpu(
            allowed.restrict(logits.float()),
            torch.tensor(options["temperatures"]),
            torch.tensor(options["uniforms"], dtype=torch.float64),
        )
        for row, choices in enumerate(ALLOWED):
            kept = list(range(VOCABULARY)) if choices is None else choices
            assert tokens[row] in kept
            assert int(on_gpu[row]) in kept
            own = (logits[row, kept] / (temperature or 1.0)).log_softmax(dim=-1)
            assert logprobs[row] == pytest.approx(float(own[kept.index(tokens[row])]), abs=1e-9)


def test_no_masks_are_no_masks() -> None:
    assert allowed_tokens([None, None]) is None
    assert allowed_tokens([]) is None
