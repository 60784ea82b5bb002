"""Each kind of adapter, everywhere it is read: by the learner, by the samplers, by PEFT, merged, and as
the base of another run."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from schemas.errors import Refused
from schemas.sampling import LoraScaling, PolicyRef
from tests.unit.trainer.batches import GROUPS, policy64
from tests.unit.trainer.support import TINY, Shelf, job, request
from tests.unit.trainer.test_policy import checkpoint, logprobs, trained, write
from trainer.engine import Engine
from trainer.forward.decoder import decoder_of
from trainer.forward.packing import MicroBatch, pack
from trainer.forward.transformers_pass import Fallback
from trainer.forward.weights import trainable_view
from trainer.model.base import ADAPTER_CONFIG, ADAPTER_NAME, build_base, load_merged
from trainer.model.lora_names import Scaling
from trainer.objective.batch import examples_of
from trainer.policy import LoadedModel, Policy, checkpoint_files, export, fresh_policy
from trainer.sampler import decode_model

KINDS: Mapping[str, Mapping[str, Any]] = {
    "lora": {},
    "rslora": {"lora_scaling": "rank_stabilized"},
    "dora": {"lora_variant": "dora"},
    "dora, rank-stabilized": {"lora_variant": "dora", "lora_scaling": "rank_stabilized"},
}
EXACT = 1e-12


@pytest.fixture(autouse=True)
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' norms round to 32 bits, which would hide what differs below 1e-7."""

    def norm(self: Qwen3RMSNorm, x: torch.Tensor) -> torch.Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(mean + self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", norm)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    found: Mapping[str, Any] = KINDS[request.param]
    return found


def plain_rows(policy: Policy) -> list[MicroBatch]:
    return list(pack(examples_of(GROUPS), micro_batch_tokens=512, share=policy.shares_prompts))


def written(policy: Policy, kind: Mapping[str, Any], folder: Path) -> Path:
    """The checkpoint of a policy, in float64 if it is in float64."""
    files, weights_name = checkpoint_files(policy, job(**kind))
    return write({**files, weights_name: export(policy.tensors)}, folder)


def in_peft(folder: Path) -> Any:
    """The checkpoint as PEFT loads it, in float64."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own
        return PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).eval()


def without_decoder(policy: Policy) -> Policy:
    """The same policy through Transformers and PEFT's own layers."""
    return replace(policy, loaded=replace(policy.loaded, decoder=None))


def logits_in(model: nn.Module, policy: Policy) -> torch.Tensor:
    """The logits of all actions, one row after the other."""
    rows = []
    for example in examples_of(GROUPS):
        ids = torch.tensor(example.sequence.tokens)
        found = model(input_ids=ids[None]).logits[0, :-1]
        rows.append(found[torch.tensor(example.sequence.loss_mask[1:]).bool()])
    return torch.cat(rows)


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    for tensor in policy.tensors.values():
        tensor.grad = None
    for micro in plain_rows(policy):
        policy.logprobs(micro, temperature=0.7)[0].exp().sum().backward()
    return {n: t.grad for n, t in policy.tensors.items() if t.grad is not None}


@pytest.mark.parametrize(
    ("kind", "factor"), [("standard", 0.5), (None, 0.5), ("rank_stabilized", 2.0)]
)
def test_a_scaling_divides_alpha_by_the_rank_or_its_root(
    kind: LoraScaling | None, factor: float
) -> None:
    assert Scaling(8.0, kind).factor(16) == factor


@torch.no_grad()
def test_peft_computes_the_logits_of_the_learner(kind: Mapping[str, Any], tmp_path: Path) -> None:
    policy = policy64(**kind)
    folder = written(policy, kind, tmp_path)
    config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    assert config["use_rslora"] == ("lora_scaling" in kind)
    assert config["use_dora"] == ("lora_variant" in kind)
    theirs = logits_in(in_peft(folder), policy)
    plain = torch.cat([policy.logits(micro, reference=True) for micro in plain_rows(policy)])
    for ours in (policy, without_decoder(policy)):
        logits = torch.cat([ours.logits(micro) for micro in plain_rows(ours)])
        assert (logits - theirs).abs().max() <= EXACT * (1 + theirs.abs().max())
    assert (plain - theirs).abs().max() > 0.1, "this adapter changes nothing"


def test_gradients_are_those_of_peft(kind: Mapping[str, Any]) -> None:
    ours = gradients(policy := policy64(**kind))
    theirs = gradients(without_decoder(policy))
    assert ours.keys() == theirs.keys() == policy.tensors.keys()
    for name, gradient in ours.items():
        assert gradient.abs().max() > 0, name
        distance = (gradient - theirs[name]).abs().max()
        assert distance <= 1e-9 * (1 + theirs[name].abs().max()), name


async def test_samplers_sample_from_what_the_learner_trains(
    kind: Mapping[str, Any],
    engine: Engine,
    shelf: Shelf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decoding in C, through torch, and without a copy of the weights; and the merged checkpoint."""
    asked = job(algorithm="sft", **kind)
    files = await trained(engine, asked)
    plain = in_peft(write(files, tmp_path))
    policy = PolicyRef(version=3, weights=shelf.put(files[ADAPTER_NAME]))
    scaling = {"lora_scaling": kind.get("lora_scaling")}
    turns = []
    for deterministic in (False, True):
        wanted = request(policy=policy, max_new_tokens=20, deterministic=deterministic)
        turns.append(await engine.sampler.sample(wanted.model_copy(update=scaling)))
    merged = request(model=checkpoint(files, shelf), max_new_tokens=20)
    turns.append(await engine.sampler.sample(merged))
    monkeypatch.setattr(decode_model, "COPY_BYTES", 0)
    other = Engine(fetch=shelf.fetch, threads=1)
    wanted = request(policy=policy, max_new_tokens=20).model_copy(update=scaling)
    turns.append(await other.sampler.sample(wanted))
    await other.aclose()
    for turn in turns:
        assert turn.logprobs == pytest.approx(logprobs(plain, turn), abs=1e-5)
        assert turn.completion_ids == turns[0].completion_ids


@torch.no_grad()
def test_a_merge_is_pefts(kind: Mapping[str, Any], tmp_path: Path) -> None:
    policy = policy64(**kind)
    single = replace(policy, tensors={name: t.float() for name, t in policy.tensors.items()})
    folder = written(single, kind, tmp_path)
    ours = load_merged(folder, what="this checkpoint")[0].state_dict()
    theirs = in_peft(folder).merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).abs().max() <= 1e-6 * (1 + theirs[name].abs().max()), name


@pytest.mark.parametrize("recompute", [False, True])
def test_a_dora_is_computed_again_with_the_same_bits(recompute: bool) -> None:
    policy = policy64(lora_variant="dora")
    expected = gradients(policy)
    again = replace(policy, forward=replace(policy.forward, recompute=recompute))
    assert all(torch.equal(expected[n], g) for n, g in gradients(again).items())


def test_a_fresh_dora_is_its_base() -> None:
    base = build_base(TINY, {}, device=torch.device("cpu"))
    loaded = LoadedModel(base, decoder_of(base), Fallback(base))
    policy = fresh_policy(loaded, job(lora_variant="dora"))
    view = trainable_view(base.tensors, policy.tensors, scaling=policy.scaling)
    assert view.factors.keys() == view.pairs.keys() != set()
    assert all(bool((factor == 1).all()) for factor in view.factors.values())


def test_a_row_without_a_length_is_refused_by_its_module() -> None:
    base = build_base(TINY, {}, device=torch.device("cpu"))
    loaded = LoadedModel(base, decoder_of(base), Fallback(base))
    base.tensors["model.layers.0.self_attn.o_proj.weight"][3:5] = 0
    fresh_policy(loaded, job())
    with pytest.raises(Refused, match=r"2 of the 32 rows of model\.layers\.0\.self_attn\.o_proj"):
        fresh_policy(loaded, job(lora_variant="dora"))
    fresh_policy(loaded, job(lora_variant="dora", lora_targets=("q_proj",)))
