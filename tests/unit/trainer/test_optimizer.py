"""The schedule, the clipping, and AdamW against torch's own."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from schemas.learner import LearnerJob
from tests.unit.trainer.support import job
from trainer.optimizer import Optimizer, lr_at


def rates(total: int, **advanced: Any) -> list[float]:
    section = job(**advanced).config.advanced
    return [lr_at(s, total_steps=total, peak=1.0, advanced=section) for s in range(1, total + 1)]


def test_the_learning_rate_is_constant_by_default() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warmup_reaches_the_peak_and_linear_never_wastes_a_step() -> None:
    assert rates(6, warmup_steps=2, lr_schedule="linear") == pytest.approx(
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    )


def test_cosine_stays_above_its_floor() -> None:
    values = rates(50, lr_schedule="cosine", lr_min_ratio=0.1)
    assert values[0] == 1.0
    assert values == sorted(values, reverse=True)
    assert 0.1 < values[-1] < 0.11


def test_a_warmup_may_be_longer_than_the_run() -> None:
    assert rates(2, warmup_steps=9) == [0.5, 1.0]


def leaves(grad: float) -> dict[str, torch.Tensor]:
    tensors = {n: torch.linspace(-1, 1, 4).view(2, 2) * (i + 1) for i, n in enumerate("ab")}
    for tensor in tensors.values():
        tensor.requires_grad_()
        tensor.grad = torch.full((2, 2), grad)
    return tensors


def test_a_step_is_adamw_with_the_global_norm_clipped() -> None:
    ours, theirs = leaves(3.0), leaves(3.0)
    adam = torch.optim.AdamW(theirs.values(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.2)
    optimizer = Optimizer.fresh(ours, job(weight_decay=0.2))
    norm = optimizer.update(lr=0.1, clip=0.5)
    torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.5)
    adam.step()
    assert norm == pytest.approx(3.0 * 8**0.5)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])
    assert all(tensor.grad is None for tensor in ours.values())


@pytest.mark.parametrize(("algorithm", "beta2"), [("grpo", 0.95), ("sft", 0.98)])
def test_the_second_beta_follows_the_algorithm(algorithm: str, beta2: float) -> None:
    group = Optimizer.fresh(leaves(1.0), job(algorithm=algorithm)).adam.param_groups[0]
    assert group["betas"] == (0.9, beta2)
    given = Optimizer.fresh(leaves(1.0), job(adam_beta2=0.5)).adam.param_groups[0]
    assert given["betas"] == (0.9, 0.5)


NAMED = {
    "model.embed_tokens.weight": (9, 4),
    "lm_head.weight": (9, 4),
    "model.norm.weight": (4,),
    "model.layers.0.input_layernorm.weight": (4,),
    "model.layers.0.self_attn.q_norm.weight": (2, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.q_proj.bias": (4,),
    "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (2, 4),
    "value.weight": (4,),
    "value.bias": (1,),
}
DECAYED = {
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
    "value.weight",
}


def shrunk(asked: LearnerJob) -> set[str]:
    """The tensors that a step without gradients makes smaller, by weight decay alone."""
    tensors = {name: torch.ones(shape) for name, shape in NAMED.items()}
    optimizer = Optimizer.fresh(tensors, asked)
    for tensor in tensors.values():
        tensor.grad = torch.zeros_like(tensor)
    optimizer.update(lr=0.1, clip=1.0)
    return {name for name, tensor in tensors.items() if float(tensor.detach().max()) < 1}


def test_weight_decay_leaves_norms_and_biases_alone() -> None:
    asked = job(weight_decay=0.5)
    assert shrunk(asked) == DECAYED
    assert shrunk(replace(asked, rules=1)) == set(NAMED), "twin: what rules 1 did"
    assert shrunk(job()) == set()


def test_the_learning_rate_of_a_step_is_that_of_all_tensors() -> None:
    tensors = {name: torch.ones(shape) for name, shape in NAMED.items()}
    optimizer = Optimizer.fresh(tensors, job(weight_decay=0.5))
    optimizer.update(lr=0.25, clip=1.0)
    for tensor in tensors.values():
        tensor.grad = torch.full_like(tensor, 0.01)
    optimizer.update(lr=0.125, clip=1e6)
    assert [group["lr"] for group in optimizer.adam.param_groups] == [0.125, 0.125]


def test_a_state_does_not_say_which_tensors_decay() -> None:
    """A state that was stored before there were two groups is loaded as it is."""
    asked = job(weight_decay=0.5)
    states = []
    for rules in (1, 2):
        tensors = {name: torch.ones(shape) for name, shape in NAMED.items()}
        optimizer = Optimizer.fresh(tensors, replace(asked, rules=rules))
        for tensor in tensors.values():
            tensor.grad = torch.full_like(tensor, 0.01)
        optimizer.update(lr=0.1, clip=1.0)
        states.append(optimizer.state())
    old, new = states
    assert {name: tensor.tolist() for name, tensor in old.items()} == {
        name: tensor.tolist() for name, tensor in new.items()
    }
    Optimizer.fresh({n: torch.ones(s) for n, s in NAMED.items()}, asked).load(old)


def test_a_loaded_count_of_updates_is_where_its_tensor_is() -> None:
    """A fused optimizer on a GPU refuses a count on the CPU."""
    state = Optimizer.fresh({"a": torch.zeros(2)}, job()).state()
    tensors = {"a": torch.zeros(2, device="meta")}
    elsewhere = Optimizer(tensors, torch.optim.AdamW(tensors.values()))
    elsewhere.load(state)
    assert elsewhere.adam.state[tensors["a"]]["step"].device.type == "meta"
