"""Each architecture of the table against Transformers' own module, in float64: logits, gradients of all
weights and of an adapter, packed rows, and each way to decode.

Transformers computes norms and rotary embeddings in float32 whatever the type of the model. Here
float32 stands for float64 in both, so that they can agree to 1e-9.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schemas.models.architectures import ARCHITECTURES
from schemas.sampling import Sequence as Row
from tests.kit.families import FAMILIES, family, random_model
from tests.unit.trainer.support import TINY, job, loss_mask
from tests.unit.trainer.test_families import EXAMPLES
from trainer.forward.decoder import causal_attend, decoder_of
from trainer.forward.ops import Forward, one_kernel_rms_norm
from trainer.forward.packing import Example, pack
from trainer.forward.rms_norm import rms_norm
from trainer.forward.spans import spans_of
from trainer.forward.transformers_pass import Fallback
from trainer.forward.varlen_attention import varlen_attend
from trainer.forward.weights import trainable_view
from trainer.model.base import Base, build_base
from trainer.model.lora_names import Scaling
from trainer.policy import LoadedModel, Policy, fresh_policy
from trainer.sampler.cuda_graph_batch import CudaGraphBatch
from trainer.sampler.decode_batch import DecodeBatch, has_independent_rows
from trainer.sampler.decode_model import DecodeModel, UnfusedModel, decode_model_of
from trainer.sampler.prefill import has_independent_prompts, read_prompts

CPU = torch.device("cpu")
LEAN = tuple(family.name for family in FAMILIES if family.lean)
WINDOWED = ("gemma3", "mistral-window", "olmo3", "phi3-window", "qwen3-window")
UNREAD = ("model.vision_tower.", "model.multi_modal_projector.")
TOKENS = 7 + torch.arange(33) * 5 % 90


def assert_equal(found: torch.Tensor, expected: torch.Tensor, msg: str | None = None) -> None:
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9, msg=msg)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 is float64, for Transformers and for us."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_base(TINY, {}, device=CPU).tokenizer


def policy(name: str, tokenizer: Any) -> Policy:
    """A policy of this family in float64, with an adapter that matters."""
    model = random_model(family(name).config()).double().requires_grad_(requires_grad=False)
    base = Base(model, tokenizer, dict(model.state_dict()), frozenset(), None)
    loaded = LoadedModel(base, decoder_of(base), Fallback(base))
    assert loaded.decoder is not None
    fresh = fresh_policy(loaded, job())
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (t + 0.1 * torch.randn(t.shape, generator=generator)).double().requires_grad_()
        for name, t in fresh.tensors.items()
    }
    return Policy(loaded, tensors, fresh.scaling)


def parts(known: Policy) -> tuple[Any, Any, Base]:
    """The decoder, Transformers' module, and the base."""
    return known.loaded.decoder, known.loaded.base.model, known.loaded.base


def test_each_architecture_of_the_table_is_tried() -> None:
    assert {family(name).config().model_type for name in LEAN} == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", LEAN)
def test_logits_and_gradients_of_all_weights_are_those_of_transformers(
    name: str, tokenizer: Any, wide: None
) -> None:
    decoder, model, base = parts(policy(name, tokenizer))
    model.requires_grad_()
    model.get_input_embeddings().padding_idx = None
    names = {n: p for n, p in model.named_parameters() if not n.startswith(UNREAD)}
    weights = torch.randn(33, 103, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    theirs = model(input_ids=TOKENS[None]).logits[0]
    expected = torch.autograd.grad((theirs * weights).sum(), list(names.values()))
    view = trainable_view(base.tensors, names, scaling=Scaling(1.0))
    attend = causal_attend(
        torch.ones(33, 33, dtype=torch.bool).tril(),
        kv_heads=decoder.kv_heads,
        windows=decoder.windows,
    )
    ours = decoder.logits(view, decoder.hidden_states(view, TOKENS, torch.arange(33), attend))
    assert_equal(ours, theirs)
    found = torch.autograd.grad((ours * weights).sum(), list(names.values()))
    for weight, mine, right in zip(names, found, expected, strict=True):
        assert_equal(mine, right, msg=weight)


@pytest.mark.parametrize("name", LEAN)
def test_packed_logprobs_and_adapter_gradients_are_those_of_peft(
    name: str, tokenizer: Any, wide: None
) -> None:
    """Our own pass over groups that share a prompt, against rows alone through Transformers and PEFT."""
    known = policy(name, tokenizer)
    general = replace(known, loaded=replace(known.loaded, decoder=None))
    outcomes = []
    for way in (known, general):
        micros = pack(EXAMPLES, micro_batch_tokens=4096, share=way.shares_prompts)
        logprobs = torch.cat([way.logprobs(micro, temperature=0.7)[0] for micro in micros])
        weights = torch.linspace(-1, 1, len(logprobs), dtype=torch.float64)
        grads = torch.autograd.grad((logprobs * weights).sum(), list(way.tensors.values()))
        outcomes.append((logprobs, grads))
    (ours, mine), (theirs, right) = outcomes
    assert_equal(ours, theirs)
    for weight, found, expected in zip(known.tensors, mine, right, strict=True):
        assert expected.abs().max() > 0, weight
        assert_equal(found, expected, msg=weight)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_gpu_s_attention_keeps_the_windows(name: str, tokenizer: Any, wide: None) -> None:
    known = policy(name, tokenizer)
    decoder, _, base = parts(known)
    assert decoder.windows.count(8) > 0
    view = trainable_view(base.tensors, known.tensors, scaling=known.scaling)
    (micro,) = pack(EXAMPLES, micro_batch_tokens=4096, share=True)
    spans = spans_of(micro.segments, device=CPU)
    attend = varlen_attend(spans, windows=decoder.windows)
    with torch.no_grad():
        hidden = decoder.hidden_states(view, micro.tokens_N, micro.positions_N, attend)
        assert_equal(hidden[micro.predictor_M], known.outputs(micro)[0])


def decode_model(known: Policy) -> DecodeModel:
    decoder, _, base = parts(known)
    view = trainable_view(base.tensors, known.tensors, scaling=known.scaling)
    return UnfusedModel(decoder, view.round_weights())


@pytest.mark.parametrize("kind", [DecodeBatch, CudaGraphBatch])
@pytest.mark.parametrize("name", LEAN)
@torch.no_grad()
def test_a_cache_decodes_what_the_whole_text_says(
    name: str, kind: type[DecodeBatch], tokenizer: Any, wide: None
) -> None:
    known = policy(name, tokenizer)
    model = decode_model(known)
    prompt, rest = tuple(TOKENS[:20].tolist()), TOKENS[20:]
    (read,) = read_prompts(model, [prompt], shape=(1, 20))
    batch = kind(model, capacity=64, size=2, fixed=True)
    row: Any = SimpleNamespace(length=21)
    batch._put(row, read.keys, read.values)
    found = [read.logits_V]
    for place, token in enumerate(rest, start=20):
        positions_R = torch.tensor([place, 0])
        if isinstance(batch, CudaGraphBatch):
            attend = batch._static_attend(2, positions_R)
            hidden = batch.model.hidden_states(torch.stack([token, token]), positions_R, attend)
            found.append(batch.model.logits(hidden)[0])
        else:
            found.append(batch.logits(torch.stack([token, token]), positions_R)[0])
    general = replace(known, loaded=replace(known.loaded, decoder=None))
    ids = tuple(TOKENS.tolist())
    whole = Row(tokens=ids, loss_mask=loss_mask(20, 13), logprobs=(0.0,) * 33)
    (micro,) = pack([Example(0, whole)], micro_batch_tokens=64, share=False)
    assert_equal(torch.stack(found[:-1]), general.logits(micro))


@pytest.mark.parametrize("name", ["gemma3", "glm4", "olmo2", "phi3-window", "smollm3"])
def test_rows_in_company_have_their_own_bits(name: str, tokenizer: Any) -> None:
    """So a deterministic run samples its rows together."""
    model = random_model(family(name).config()).requires_grad_(requires_grad=False)
    base = Base(model, tokenizer, dict(model.state_dict()), frozenset(), None)
    decoder = decoder_of(base)
    assert decoder is not None
    view = trainable_view(base.tensors, {}, scaling=Scaling(1.0))
    decodes = decode_model_of(decoder, view, num_bytes=base.num_bytes)
    assert isinstance(decodes, UnfusedModel)
    assert decodes.native_decoder is None
    assert has_independent_rows(DecodeBatch(decodes, capacity=64, size=32, fixed=True))
    assert has_independent_prompts(decodes, (8, 32))


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("name", LEAN)
def test_logits_in_chunks_through_transformers_are_the_same(
    name: str, tuning: str, tokenizer: Any, wide: None
) -> None:
    """Few logits at a time, against those of all tokens at once as under rules 5."""
    known = policy(name, tokenizer)
    tensors = known.tensors
    if tuning == "full":
        names = known.loaded.base.model.named_parameters()
        tensors = {n: p.detach().clone().requires_grad_() for n, p in names}
    outcomes = []
    for chunked in (True, False):
        way = replace(
            known,
            loaded=replace(known.loaded, decoder=None),
            tensors=tensors,
            forward=Forward(chunks_general_logits=chunked),
        )
        assert way.loaded.fallback.has_plain_head
        (micro,) = pack(EXAMPLES, micro_batch_tokens=4096, share=False)
        assert (way._hidden_states(micro, reference=False) is not None) == chunked
        logprobs, entropies = way.logprobs(micro, temperature=0.7, trains_entropy=True)
        total = (logprobs * torch.linspace(-1, 1, len(logprobs)).double()).sum() + entropies.sum()
        grads = torch.autograd.grad(total, list(tensors.values()), allow_unused=True)
        outcomes.append([logprobs, entropies, *(g for g in grads if g is not None)])
    for found, expected in zip(*outcomes, strict=True):
        assert_equal(found, expected)


def test_bounded_logits_are_not_computed_in_chunks(tokenizer: Any) -> None:
    model = random_model(family("gemma3-bounded").config())
    base = Base(model, tokenizer, dict(model.state_dict()), frozenset(), None)
    assert not Fallback(base).has_plain_head


@pytest.mark.parametrize("name", LEAN)
def test_each_architecture_is_lean_in_half_precision(name: str, tokenizer: Any) -> None:
    """With the frequencies of the rotary embedding in float32, as when a model is loaded."""
    model = random_model(family(name).config())
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.config.dtype = torch.bfloat16
    base = Base(model, tokenizer, dict(model.state_dict()), frozenset(), None)
    assert decoder_of(base) is not None


def test_a_norm_of_another_type_than_the_states_is_the_plain_one() -> None:
    """Gemma's 1 + weight is float32. PyTorch has no kernel for such a pair, and would warn."""
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8)
    assert torch.equal(one_kernel_rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6))
