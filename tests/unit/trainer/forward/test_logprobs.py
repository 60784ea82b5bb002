"""Log-probabilities computed a chunk at a time, against torch's own over all logits."""

import pytest
import torch

from trainer.forward.logprobs import chosen_logprobs

ACTIONS, HIDDEN, VOCABULARY = 7, 5, 11


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ACTIONS, HIDDEN, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    target = torch.randint(VOCABULARY, (ACTIONS,), generator=generator)
    return hidden.requires_grad_(), head.requires_grad_(), target


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_value_and_gradients_are_those_of_torch(chunk: int, temperature: float) -> None:
    hidden, head, target = drawn()
    mine, entropy = chosen_logprobs(
        hidden, head, target, temperature=temperature, chunk_elements=chunk * VOCABULARY
    )
    everything = (hidden @ head.t() / temperature).log_softmax(-1)
    theirs = everything.gather(-1, target[:, None])[:, 0]
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
    expected = -(everything.exp() * everything).sum(-1)
    torch.testing.assert_close(entropy, expected.detach(), atol=1e-12, rtol=0)
    assert not entropy.requires_grad
    weight = torch.arange(1.0, ACTIONS + 1, dtype=torch.float64)
    for ours, reference in zip(
        torch.autograd.grad((mine * weight).sum(), (hidden, head)),
        torch.autograd.grad((theirs * weight).sum(), (hidden, head)),
        strict=True,
    ):
        torch.testing.assert_close(ours, reference, atol=1e-12, rtol=0)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_gradient_of_the_entropy_is_that_of_torch(
    chunk: int, temperature: float, share: float
) -> None:
    """Also together with that of the log-probabilities, which comes out of the same pass."""
    hidden, head, target = drawn()
    mine, entropy = chosen_logprobs(
        hidden,
        head,
        target,
        temperature=temperature,
        chunk_elements=chunk * VOCABULARY,
        trains_entropy=True,
    )
    everything = (hidden @ head.t() / temperature).log_softmax(-1)
    theirs = everything.gather(-1, target[:, None])[:, 0]
    expected = -(everything.exp() * everything).sum(-1)
    torch.testing.assert_close(entropy, expected, atol=1e-12, rtol=0)
    weight = torch.arange(1.0, ACTIONS + 1, dtype=torch.float64)
    for ours, reference in zip(
        torch.autograd.grad(
            (share * mine * weight + entropy * weight.flip(0)).sum(), (hidden, head)
        ),
        torch.autograd.grad(
            (share * theirs * weight + expected * weight.flip(0)).sum(), (hidden, head)
        ),
        strict=True,
    ):
        assert float(reference.abs().max()) > 0.1
        torch.testing.assert_close(ours, reference, atol=1e-12, rtol=0)


def test_the_entropy_of_a_certain_token_has_no_slope() -> None:
    """Its log-probability is far below what exp can hold, and nothing is NaN."""
    hidden = (torch.eye(2, dtype=torch.float32) * 1e4).requires_grad_()
    head = torch.eye(2, dtype=torch.float32)
    _, entropy = chosen_logprobs(
        hidden, head, torch.tensor([0, 1]), temperature=1.0, trains_entropy=True
    )
    entropy.sum().backward()
    assert entropy.tolist() == [0.0, 0.0]
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, target = drawn()
    chosen_logprobs(hidden, head.detach(), target, temperature=1.0)[0].sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_no_actions_have_no_logprobs() -> None:
    hidden, head, target = drawn()
    found, _ = chosen_logprobs(hidden[:0], head, target[:0], temperature=1.0)
    assert found.shape == (0,)


def test_no_tensor_holds_the_logits_of_all_actions() -> None:
    """Neither during their computation nor for the backward pass. Twin: with a single chunk, one
    tensor does."""
    hidden, head, target = drawn()

    def largest(chunk: int) -> int:
        elements = chunk * VOCABULARY
        made: list[int] = []

        def seen(hidden_C_H: torch.Tensor, head_V_H: torch.Tensor) -> torch.Tensor:
            computed = hidden_C_H @ head_V_H.t()
            made.append(computed.numel())
            return computed

        saved: list[int] = []

        def save(t: torch.Tensor) -> torch.Tensor:
            saved.append(t.numel() if t is not head else 0)
            return t

        with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
            found, _ = chosen_logprobs(
                hidden, head, target, temperature=1.0, chunk_elements=elements, logits=seen
            )
        found.sum().backward()
        return max(made + saved)

    assert largest(2) < ACTIONS * VOCABULARY
    assert largest(100) == ACTIONS * VOCABULARY


@pytest.mark.parametrize("trains_entropy", [True, False])
@pytest.mark.parametrize("kept", [1, 4, ACTIONS])
def test_kept_logits_change_no_bit(kept: int, *, trains_entropy: bool) -> None:
    """The logits of the first chunks are kept. They serve one backward pass; a second one computes them
    again."""
    hidden, head, target = drawn()
    weight = torch.arange(1.0, ACTIONS + 1, dtype=torch.float64)
    computed: list[int] = []

    def logits(hidden_C_H: torch.Tensor, head_V_H: torch.Tensor) -> torch.Tensor:
        computed.append(len(hidden_C_H))
        return hidden_C_H @ head_V_H.t()

    def gradients(kept_actions: int) -> tuple[torch.Tensor, ...]:
        computed.clear()
        found, entropy = chosen_logprobs(
            hidden,
            head,
            target,
            temperature=0.6,
            chunk_elements=2 * VOCABULARY,
            kept_elements=kept_actions * VOCABULARY,
            trains_entropy=trains_entropy,
            logits=logits,
        )
        total = (found * weight).sum() + (entropy.sum() if trains_entropy else 0)
        first = torch.autograd.grad(total, (hidden, head), retain_graph=True)
        assert sum(computed) == 2 * ACTIONS - kept_actions
        again = torch.autograd.grad(total, (hidden, head))
        return found, entropy, *first, *again

    for one, other in zip(gradients(kept), gradients(0), strict=True):
        assert torch.equal(one, other)


def test_a_pass_without_a_gradient_keeps_no_logits() -> None:
    hidden, head, target = drawn()
    with torch.no_grad():
        found, _ = chosen_logprobs(hidden, head, target, temperature=1.0, kept_elements=1 << 20)
    assert found.grad_fn is None
    found, _ = chosen_logprobs(hidden, head, target, temperature=1.0, kept_elements=1 << 20)
    assert len(found.grad_fn.kept) == 1  # type: ignore[union-attr]  # the context of the function
    found, _ = chosen_logprobs(
        hidden.detach(), head.detach(), target, temperature=1.0, kept_elements=1 << 20
    )
    assert found.grad_fn is None
