"""Muon against the formula of its paper in float64, and what it leaves to AdamW.

torch orthogonalises in bfloat16, so an update differs from the formula by about one percent. The bits
are the same each time.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import CorruptData
from schemas.learner import StepResult
from schemas.sampling import ModelRef
from tests.kit.families import family, save_random_model
from tests.unit.trainer.support import TINY, job, weights_of, with_state
from tests.unit.trainer.test_learner import play
from trainer.engine import Engine
from trainer.forward.decoder import decoder_of
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import build_base
from trainer.model.lora_names import A_SUFFIX, B_SUFFIX
from trainer.optimizer import FIRST, MOMENTUM, Optimizer, Optimizers, muon_matrices
from trainer.policy import LoadedModel, Policy, export, fresh_policy, parse

CPU = torch.device("cpu")
SHAPES = {"wide": (8, 24), "tall": (24, 8), "square": (12, 12), "thin": (1, 16)}
MUON: Mapping[str, Any] = {"optimizer": "muon"}


def orthogonalise(update: torch.Tensor) -> torch.Tensor:
    """Five steps of the quintic Newton-Schulz iteration, in the precision of the update."""
    is_tall = update.shape[0] > update.shape[1]
    x = update.T if is_tall else update
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if is_tall else x


def by_hand(
    start: torch.Tensor, gradients: list[torch.Tensor], *, lr: float, momentum: float, decay: float
) -> torch.Tensor:
    """The matrix after a step for each gradient, in float64."""
    weight, velocity = start.double(), torch.zeros_like(start, dtype=torch.float64)
    for gradient in map(torch.Tensor.double, gradients):
        velocity = momentum * velocity + (1 - momentum) * gradient
        ahead = momentum * velocity + (1 - momentum) * gradient
        size = 0.2 * math.sqrt(max(weight.shape))
        weight = (1 - lr * decay) * weight - lr * size * orthogonalise(ahead)
    return weight


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("momentum", [None, 0.5])
def test_a_step_is_muon_of_the_paper(shape: tuple[int, int], momentum: float | None) -> None:
    draws = torch.Generator().manual_seed(3)
    start, *gradients = (torch.randn(shape, generator=draws) for _ in range(4))
    weight = start.clone()
    asked = job(weight_decay=0.3, muon_momentum=momentum, **MUON)
    optimizer = Optimizer.fresh({"a": weight}, asked, matrices=frozenset("a"))
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.update(lr=0.1, clip=1e9)
        assert weight.grad is None
    expected = by_hand(
        start, gradients, lr=0.1, momentum=0.95 if momentum is None else momentum, decay=0.3
    )
    moved = expected - start.double()
    assert (weight.detach() - expected).norm() <= 0.02 * moved.norm()
    plain = by_hand(start, gradients, lr=0.1, momentum=0.0, decay=0.3)
    assert (plain - expected).norm() > 0.05 * moved.norm() or min(shape) == 1


def test_an_update_is_as_large_as_one_of_adamw() -> None:
    """Its root mean square is about 0.2 lr, whatever the shape and the size of the gradient."""
    draws = torch.Generator().manual_seed(3)
    for shape in ((64, 8), (8, 64), (16, 256)):
        for size in (1e-4, 1.0, 1e4):
            weight = torch.zeros(shape)
            optimizer = Optimizer.fresh({"a": weight}, job(**MUON), matrices=frozenset("a"))
            weight.grad = size * torch.randn(shape, generator=draws)
            optimizer.update(lr=1.0, clip=1e9)
            assert 0.1 < float(weight.detach().pow(2).mean().sqrt()) < 0.3, (shape, size)


def test_a_gradient_of_zero_moves_nothing() -> None:
    weight = torch.ones(3, 4)
    optimizer = Optimizer.fresh({"a": weight}, job(**MUON), matrices=frozenset("a"))
    weight.grad = torch.zeros_like(weight)
    optimizer.update(lr=1.0, clip=1.0)
    assert torch.equal(weight.detach(), torch.ones(3, 4))


def policy_of(ref: ModelRef, **advanced: Any) -> Policy:
    base = build_base(ref, {}, device=CPU)
    return fresh_policy(LoadedModel(base, decoder_of(base), Fallback(base)), job(ref, **advanced))


def test_embeddings_and_norms_are_left_to_adamw(tmp_path: Path) -> None:
    save_random_model(family("llama3").config(), tmp_path)
    untied = ModelRef(kind="directory", name=str(tmp_path))
    for ref in (TINY, untied):
        policy = policy_of(ref, tuning="full", **MUON)
        rest = policy.tensors.keys() - muon_matrices(policy)
        tables = {"model.embed_tokens.weight", "lm_head.weight"} & policy.tensors.keys()
        assert rest == tables | {name for name, t in policy.tensors.items() if t.ndim == 1}
        assert all(name.endswith("proj.weight") for name in muon_matrices(policy))


def test_magnitudes_of_a_dora_are_left_to_adamw() -> None:
    policy = policy_of(TINY, lora_variant="dora", **MUON)
    rest = policy.tensors.keys() - muon_matrices(policy)
    assert {name.rpartition(".")[2] for name in rest} == {"lora_magnitude_vector"}
    assert 3 * len(rest) == len(policy.tensors)


def test_an_adapter_is_updated_by_muon_alone() -> None:
    policy = policy_of(TINY, **MUON)
    assert muon_matrices(policy) == policy.tensors.keys()
    assert {name[-len(A_SUFFIX) :] for name in policy.tensors} == {A_SUFFIX, B_SUFFIX}


def test_all_gradients_are_cleared() -> None:
    tensors = {"matrix": torch.ones(3, 4), "norm": torch.ones(4)}
    optimizer = Optimizer.fresh(tensors, job(**MUON), matrices=frozenset({"matrix"}))
    for tensor in tensors.values():
        tensor.grad = torch.ones_like(tensor)
    optimizer.update(lr=0.1, clip=1.0)
    assert [tensor.grad for tensor in tensors.values()] == [None, None]


def test_a_critic_is_updated_by_adamw() -> None:
    policy = policy_of(TINY, algorithm="ppo", **MUON)
    optimizers = Optimizers.fresh(policy, job(algorithm="ppo", **MUON))
    assert optimizers.policy.muon is not None
    assert optimizers.critic is not None
    assert optimizers.critic.muon is None


async def trained(engine: Engine, steps: int = 3, **advanced: Any) -> list[StepResult]:
    asked = job(**MUON, **advanced)
    results = [await engine.learner.initialize(asked)]
    for step in range(1, steps + 1):
        results.append(await engine.learner.step(asked, play(step), export_state=True))
    return results


def state_of(result: StepResult) -> dict[str, torch.Tensor]:
    assert result.state.state is not None
    return parse(result.state.state, device=CPU)


@pytest.mark.parametrize("tuning", ["lora", "full"])
async def test_a_state_holds_a_momentum_for_each_matrix(engine: Engine, tuning: str) -> None:
    first, *_, last = await trained(engine, tuning=tuning)
    state = state_of(last)
    momenta = {n.removeprefix(MOMENTUM) for n in state if n.startswith(MOMENTUM)}
    moments = {n.removeprefix(FIRST) for n in state if n.startswith(FIRST)}
    names = parse(weights_of(last.state), device=CPU).keys()
    assert not momenta & moments
    assert momenta | moments == names
    assert bool(moments) == (tuning == "full")
    assert state.keys() == state_of(first).keys()
    assert all(float(state[MOMENTUM + name].abs().max()) > 0 for name in momenta)


async def test_without_its_momentum_a_step_has_other_bits(engine: Engine) -> None:
    results = await trained(engine)
    asked = job(**MUON)
    for emptied in (False, True):
        state = results[2].state
        if emptied:
            tensors = state_of(results[2])
            zeros = {n: torch.zeros_like(t) for n, t in tensors.items() if n.startswith(MOMENTUM)}
            state = with_state(state, export({**tensors, **zeros}))
        await engine.learner.load(asked, state)
        again = await engine.learner.step(asked, play(3), export_state=True)
        assert (again.state.weights == results[3].state.weights) != emptied


async def test_a_state_of_adamw_does_not_fit(engine: Engine) -> None:
    other = (await engine.learner.initialize(job())).state
    with pytest.raises(CorruptData, match="optimizer's moments do not fit"):
        await engine.learner.load(job(**MUON), other)
