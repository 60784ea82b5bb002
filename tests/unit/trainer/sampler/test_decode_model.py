"""The sampler's own copy of a version against the learner's pass over the same tensors, in
float64."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig

from producers.core import estimates
from tests.kit.families import SHAPE, family, random_model
from tests.unit.trainer.support import TINY
from trainer.forward.decoder import Decoder, causal_attend, decoder_of
from trainer.forward.weights import Trainable, trainable_view
from trainer.model.base import Base, build_base
from trainer.model.lora import fresh_adapter, target_modules
from trainer.model.lora_names import Scaling
from trainer.sampler import batcher, decode_model
from trainer.sampler.decode_model import FusedModel, UnfusedModel, decode_model_of

QWEN3 = family("qwen3").config
QWEN2 = family("qwen2.5").config


def _llama() -> PreTrainedConfig:
    return LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)


def base_of(config: Callable[[], PreTrainedConfig]) -> Base:
    model = random_model(config(), spread=0.1)
    tokenizer = build_base(TINY, {}, device=torch.device("cpu")).tokenizer
    return Base(model, tokenizer, dict(model.state_dict()), frozenset(), None)


def views(base: Base) -> dict[str, Trainable]:
    """An untrained policy, an adapter on all or some layers, and full weights; in float64."""
    generator = torch.Generator().manual_seed(1)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() + 0.1 * torch.randn(tensor.shape, generator=generator)

    double = {name: tensor.double() for name, tensor in base.tensors.items()}

    def adapter(targets: str | tuple[str, ...]) -> Trainable:
        fresh = fresh_adapter(base, target_modules(base, targets), rank=4, seed=0)
        return trainable_view(
            double, {name: noise(t) for name, t in fresh.items()}, scaling=Scaling(8.0)
        )

    full = {name: noise(p.detach()) for name, p in base.model.named_parameters()}
    return {
        "nothing": trainable_view(double, {}, scaling=Scaling(1.0)),
        "all-linear": adapter("all-linear"),
        "some": adapter(("k_proj", "up_proj")),
        "full": trainable_view(double, full, scaling=Scaling(1.0)),
    }


def decoder(base: Base) -> Decoder:
    found = decoder_of(base)
    assert found is not None
    return found


@pytest.mark.parametrize("config", [_llama, QWEN2, QWEN3])
def test_fused_logits_are_the_learner_s(config: Callable[[], PreTrainedConfig]) -> None:
    base = base_of(config)
    shape = decoder(base)
    tokens, positions = torch.arange(20) * 5 % 103, torch.arange(20)
    attend = causal_attend(torch.ones(20, 20, dtype=torch.bool).tril(), kv_heads=shape.kv_heads)
    for name, view in views(base).items():
        expected = shape.logits(view, shape.hidden_states(view, tokens, positions, attend))
        fused = decode_model_of(shape, view, num_bytes=base.num_bytes)
        assert isinstance(fused, FusedModel)
        found = fused.logits(fused.hidden_states(tokens, positions, attend))
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11, msg=name)


def test_fusing_leaves_the_version_as_it_is() -> None:
    base = base_of(QWEN3)
    for view in views(base).values():
        before = {name: tensor.clone() for name, tensor in view.base.items()}
        fused = decode_model_of(decoder(base), view, num_bytes=base.num_bytes)
        tokens, shape = torch.arange(4), decoder(base)
        attend = causal_attend(torch.ones(4, 4, dtype=torch.bool).tril(), kv_heads=shape.kv_heads)
        with torch.no_grad():
            fused.logits(fused.hidden_states(tokens, tokens, attend))
        assert all(torch.equal(view.base[name], before[name]) for name in before)


def test_a_model_that_cannot_be_copied_is_read_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = base_of(QWEN3)
    view, shape = views(base)["nothing"], decoder(base)
    half = replace(view, dtype=torch.bfloat16)
    assert isinstance(decode_model_of(shape, half, num_bytes=base.num_bytes), UnfusedModel)
    monkeypatch.setattr(decode_model, "COPY_BYTES", 1)
    apart = decode_model_of(shape, view, num_bytes=base.num_bytes)
    assert isinstance(apart, UnfusedModel)
    tokens = torch.arange(4)
    attend = causal_attend(torch.ones(4, 4, dtype=torch.bool).tril(), kv_heads=shape.kv_heads)
    monkeypatch.undo()
    fused = decode_model_of(shape, view, num_bytes=base.num_bytes)
    torch.testing.assert_close(
        apart.logits(apart.hidden_states(tokens, tokens, attend)),
        fused.logits(fused.hidden_states(tokens, tokens, attend)),
        atol=1e-11,
        rtol=1e-11,
    )


def test_the_estimate_of_a_run_knows_which_models_are_copied() -> None:
    known = (estimates.COPY_BYTES, estimates.PACKED_BYTES, estimates.COPIED_VERSIONS)
    assert known == (decode_model.COPY_BYTES, decode_model.PACKED_BYTES, batcher.KEPT_MODELS)
