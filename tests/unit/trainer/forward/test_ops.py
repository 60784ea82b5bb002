"""Ways to run a pass: recomputed, compiled, without padding. None of them changes the result."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from schemas.errors import Refused
from tests.unit.trainer.batches import CPU, MIXED, accumulate_grpo, policy64
from tests.unit.trainer.support import TINY, job
from trainer.forward.decoder import decoder_of
from trainer.forward.ops import INFERENCE, PLAIN, SAMPLING, Forward, compiled_steps
from trainer.forward.packing import Example, MicroBatch, pack
from trainer.forward.spans import Segment, spans_of
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import build_base
from trainer.objective.hyperparameters import Hyperparameters
from trainer.policy import LoadedModel, Policy, forward_of, fresh_policy

Gradients = dict[str, torch.Tensor]
EXAMPLES = tuple(
    Example(i, row)
    for i, row in enumerate(
        row for group in MIXED for sample in group.samples for row in sample.sequences
    )
)


def trained(policy: Policy) -> Gradients:
    for tensor in policy.tensors.values():
        tensor.grad = None
    accumulate_grpo(policy, MIXED, Hyperparameters(micro_batch_tokens=64, kl_coef=0.1))
    return {n: t.grad.clone() for n, t in policy.tensors.items() if t.grad is not None}


def difference(one: Gradients, other: Gradients) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def tiny(**advanced: Any) -> Policy:
    base = build_base(TINY, {}, device=CPU)
    policy = fresh_policy(LoadedModel(base, decoder_of(base), Fallback(base)), job(**advanced))
    for tensor in policy.tensors.values():
        tensor.requires_grad_()
    return policy


def test_recomputed_gradients_have_the_same_bits() -> None:
    """Both run through torch, because the C functions keep what torch would compute again."""
    kept, again = trained(tiny(deterministic=True)), trained(tiny(recompute=True))
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)


CUDA = torch.device("cuda")


def test_a_gpu_computes_more_logits_at_a_time_except_for_runs_of_older_rules() -> None:
    loaded, advanced = tiny().loaded, job().config.advanced
    now, before = forward_of(loaded, advanced), forward_of(loaded, advanced, rules=3)
    assert now.chunk_elements(CUDA) > before.chunk_elements(CUDA)
    assert now.chunk_elements(CPU) == before.chunk_elements(CPU) == before.chunk_elements(CUDA)


def test_logits_are_kept_on_a_cpu_that_has_the_memory() -> None:
    assert Forward().kept_elements(CPU) == 32 << 20
    assert Forward(recompute=True).kept_elements(CPU) == 0
    assert Forward().kept_elements(CUDA) == 0


def test_only_a_sampler_on_a_gpu_takes_the_norm_without_a_written_gradient() -> None:
    """That norm rounds differently, so the steps of a CPU and of a learner keep their own."""
    assert SAMPLING.steps(CUDA) is INFERENCE
    assert SAMPLING.steps(CPU) is Forward().steps(CUDA) is PLAIN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_sampler_is_that_of_the_learner(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 64, generator=generator).to(dtype)
    weight = torch.randn(64, generator=generator).to(dtype)
    torch.testing.assert_close(INFERENCE.norm(x, weight, 1e-6), PLAIN.norm(x, weight, 1e-6))


def peak_bytes(policy: Policy, micro: MicroBatch) -> int:
    """The peak memory of tensors in a forward and backward pass, less the memory that was in use
    before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        policy.logprobs(micro, temperature=1.0)[0].sum().backward()
    results = recorded.profiler.kineto_results
    changes = [e for e in results.events() if e.name() == "[memory]"]
    held = most = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most


def test_recomputing_takes_less_memory() -> None:
    """Eight layers keep either the activations of eight layers, or eight inputs and the activations
    of one layer. Both passes are torch's, because the one in C keeps less."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=103,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    base = build_base(TINY, {}, device=CPU)
    model = Qwen3ForCausalLM(config).eval().requires_grad_(requires_grad=False)
    base = replace(base, model=model, tensors=dict(model.state_dict()))
    loaded = LoadedModel(base, decoder_of(base), Fallback(base))
    (micro,) = pack(EXAMPLES * 4, micro_batch_tokens=1 << 20, share=True)
    peaks = []
    for recompute in (False, True):
        policy = fresh_policy(loaded, job(recompute=recompute, deterministic=True))
        for tensor in policy.tensors.values():
            tensor.requires_grad_()
        peaks.append(peak_bytes(policy, micro))
    assert peaks[1] < 0.4 * peaks[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_compiled_steps_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for a GPU but run by the eager backend, because the code generator needs a GPU."""
    expected = trained(tiny())
    monkeypatch.setattr(Forward, "steps", lambda self, device: compiled_steps("aot_eager"))
    assert difference(trained(tiny(compile=True)), expected) <= 1e-6


def test_a_cpu_leaves_the_steps_alone() -> None:
    assert Forward(fuse=True).steps(CPU) is PLAIN


def test_rows_without_padding_say_the_same() -> None:
    """In float64, gradients included; trees share their prompts in both ways."""
    policy = policy64()
    found = []
    for pads in (True, False):
        for tensor in policy.tensors.values():
            tensor.grad = None
        (micro,) = pack(EXAMPLES, micro_batch_tokens=1 << 20, share=True, pads=pads)
        assert bool(micro.blocks) == pads
        logprobs_M, _ = policy.logprobs(micro, temperature=1.0)
        (logprobs_M * torch.linspace(-1, 1, len(logprobs_M))).sum().backward()
        gradients = {n: t.grad.clone() for n, t in policy.tensors.items() if t.grad is not None}
        found.append(gradients | {"logprobs": logprobs_M.detach()})
    assert difference(*found) <= 1e-12


def test_a_gpu_gets_rows_without_padding_unless_transformers_reads_them() -> None:
    """A mask for blocks of 16,384 tokens would take 268 MB."""
    elsewhere = torch.device("meta")
    for share, padded in ((True, False), (False, True)):
        (micro,) = pack(EXAMPLES, micro_batch_tokens=1 << 20, share=share, device=elsewhere)
        assert bool(micro.blocks) == padded


def test_spans_follow_one_another() -> None:
    spans = spans_of((Segment(0, 4), Segment(4, 6, (range(4),)), Segment(6, 9)), device=CPU)
    assert spans.query_ends_S.tolist() == [0, 4, 6, 9]
    assert spans.key_ends_S.tolist() == [0, 4, 10, 13]
    assert spans.key_U is not None
    assert spans.key_U.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert (spans.longest_query, spans.longest_keys) == (4, 6)
    assert spans_of((Segment(0, 4), Segment(4, 6)), device=CPU).key_U is None
    with pytest.raises(ValueError, match="follow one another"):
        spans_of((Segment(0, 4), Segment(5, 6)), device=CPU)


def test_recomputing_is_refused_where_transformers_runs_the_model() -> None:
    base = build_base(TINY, {}, device=CPU)
    with pytest.raises(Refused, match=r"advanced.recompute .* lower advanced.micro_batch_tokens"):
        fresh_policy(LoadedModel(base, None, Fallback(base)), job(recompute=True))
