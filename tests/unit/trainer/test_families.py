"""Each family loads, samples and trains through our own path, and agrees with Transformers and
PEFT.

What was seen on a CPU: logprobs within 5e-7 of Transformers', packed rows within 5e-7 of rows alone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)

from schemas.errors import Refused
from schemas.learner import GradedGroup, StepBatch
from schemas.models.families import LEAN, NEW_LEAN_RULES, forward_pass
from schemas.sampling import ModelRef, SampleRecord, SampleRequest, Turn
from schemas.sampling import Sequence as Row
from tests.kit.families import FAMILIES, Family, family, save_random_model
from tests.unit.trainer.support import Shelf, job, loss_mask, request
from tests.unit.trainer.test_policy import write
from trainer.engine import Engine
from trainer.forward.decoder import decoder_of
from trainer.forward.packing import Example, pack
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import build_base
from trainer.model.merge import main as merge
from trainer.policy import LoadedModel, Policy, checkpoint_files, export, fresh_policy
from trainer.sampler.counter_rng import CounterRng, prompt_hash
from trainer.sampler.draw_token import draw_tokens

CPU = torch.device("cpu")
AGREES = 1e-5
PACKS = 1e-6


@dataclass(frozen=True)
class Known:
    """A model of a family: its path, the model as Transformers loads it, and as a worker does, once for
    all of its runs."""

    family: Family
    plain: PreTrainedModel
    ref: ModelRef
    loaded: LoadedModel


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    folder = tmp_path_factory.mktemp(request.param.name)
    plain = save_random_model(request.param.config(), folder)
    return Known(request.param, plain, *loaded_from(folder))


def loaded_from(folder: Path) -> tuple[ModelRef, LoadedModel]:
    """The model of a directory, as a worker loads it."""
    ref = ModelRef(kind="directory", name=str(folder))
    base = build_base(ref, {}, device=CPU)
    return ref, LoadedModel(base, decoder_of(base), Fallback(base))


def adapted(known: Known) -> Policy:
    """A policy whose adapter changes the model's output."""
    fresh = fresh_policy(known.loaded, job(known.ref))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in fresh.tensors.items()
    }
    return Policy(fresh.loaded, tensors, fresh.scaling)


def row(length: int, prompt: int, start: int) -> Row:
    tokens = tuple(7 + (start + 5 * i) % 90 for i in range(length))
    mask = loss_mask(prompt, length - prompt)
    return Row(tokens=tokens, loss_mask=mask, logprobs=(0.0,) * length)


def forked(whole: Row, at: int) -> Row:
    """The same prompt with another continuation."""
    tokens = (*whole.tokens[:at], *(7 + t % 83 for t in whole.tokens[at:]))
    return Row(tokens=tokens, loss_mask=whole.loss_mask, logprobs=whole.logprobs)


LEAN_BEFORE = ("llama3", "mistral", "qwen2.5", "qwen3", "smollm2")
"""The families that the lean decoder computed from the beginning."""

FIRST = row(31, 12, 3)
ROWS = (FIRST, forked(FIRST, 12), forked(forked(FIRST, 12), 15), row(9, 2, 40), row(20, 4, 11))
EXAMPLES = tuple(Example(i, r) for i, r in enumerate(ROWS))


@torch.no_grad()
def of(policy: Policy, examples: Sequence[Example], *, reference: bool = False) -> torch.Tensor:
    parts = [
        policy.logprobs(micro, temperature=1.0, reference=reference)[0]
        for micro in pack(examples, micro_batch_tokens=4096, share=policy.shares_prompts)
    ]
    return torch.cat(parts)


@torch.no_grad()
def expected(model: torch.nn.Module) -> torch.Tensor:
    """The same by plain Transformers, one row at a time."""
    parts = []
    for example in EXAMPLES:
        ids = torch.tensor(example.sequence.tokens)
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(-1, ids[1:, None])[:, 0]
        parts.append(chosen[torch.tensor(example.sequence.loss_mask[1:]).bool()])
    return torch.cat(parts)


def test_the_lean_decoder_takes_what_it_knows(known: Known) -> None:
    assert adapted(known).shares_prompts == known.family.lean


def test_the_config_file_alone_says_which_pass_runs(known: Known) -> None:
    config = json.loads((Path(known.ref.name) / "config.json").read_text())
    said = forward_pass(config)
    assert said.runs == ("lean" if known.family.lean else "general")
    assert bool(said.why) != known.family.lean


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_run_keeps_the_pass_that_it_started_with(known: Known, tuning: str) -> None:
    """Its steps are computed again when it is verified or resumed, and must have the same bits."""
    asked = job(known.ref, tuning=tuning)
    before = fresh_policy(known.loaded, replace(asked, rules=NEW_LEAN_RULES - 1))
    assert before.shares_prompts == (known.family.name in LEAN_BEFORE)
    assert fresh_policy(known.loaded, asked).shares_prompts == known.family.lean


@pytest.mark.parametrize("named", ["LlamaModel", "LlamaForSequenceClassification"])
def test_the_class_that_wrote_a_model_does_not_choose_its_pass(named: str, tmp_path: Path) -> None:
    """A run on such a model has always been lean, and its bits depend on it."""
    save_random_model(family("smollm2").config(), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"architectures": [named]}
    file.write_text(json.dumps(config))
    base = build_base(ModelRef(kind="directory", name=str(tmp_path)), {}, device=CPU)
    assert decoder_of(base) is not None
    assert forward_pass(config) == LEAN


def test_logprobs_are_those_of_transformers(known: Known) -> None:
    ours = of(adapted(known), EXAMPLES, reference=True)
    assert (ours - expected(known.plain)).abs().max() <= AGREES


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
def test_an_adapter_says_the_same_in_peft(known: Known, tmp_path: Path) -> None:
    from peft import PeftModel

    policy = adapted(known)
    files, weights_name = checkpoint_files(policy, job(known.ref))
    for name, content in (files | {weights_name: export(policy.tensors)}).items():
        (tmp_path / name).write_bytes(content)
    base = AutoModelForCausalLM.from_pretrained(known.ref.name)
    plain = PeftModel.from_pretrained(base, tmp_path).eval()
    ours = of(policy, EXAMPLES)
    assert (ours - expected(plain)).abs().max() <= AGREES
    assert (ours - expected(known.plain)).abs().max() > 0.1, "this adapter changes nothing"
    assert not any("vision" in name for name in policy.tensors)


@torch.no_grad()
def test_a_merged_model_is_written_and_read_again(known: Known, tmp_path: Path) -> None:
    """Also where several matrices of the decoder are one tensor of the family's files."""
    policy = adapted(known)
    files, weights_name = checkpoint_files(policy, job(known.ref))
    folder = write(files | {weights_name: export(policy.tensors)}, tmp_path / "adapter")
    assert merge([str(folder), str(tmp_path / "model")]) == 0
    merged, loaded = loaded_from(tmp_path / "model")
    assert loaded.base.tensors.keys() == known.loaded.base.tensors.keys()
    found = of(fresh_policy(loaded, job(merged)), EXAMPLES, reference=True)
    assert (found - of(policy, EXAMPLES)).abs().max() <= AGREES
    assert (found - of(policy, EXAMPLES, reference=True)).abs().max() > 0.01


def test_packed_rows_say_what_rows_alone_say(known: Known) -> None:
    policy = adapted(known)
    alone = torch.cat([of(policy, [example]) for example in EXAMPLES])
    assert (of(policy, EXAMPLES) - alone).abs().max() <= PACKS


GENERAL = [one for one in FAMILIES if not one.lean]


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("family", GENERAL, ids=lambda family: family.name)
def test_a_run_starts_on_a_model_that_has_the_layers_of_another_run(
    family: Family, tuning: str, tmp_path: Path
) -> None:
    """A worker keeps a model for all runs. Once one of them has an adapter, peft's layers stay in it."""
    plain = save_random_model(family.config(), tmp_path)
    known = Known(family, plain, *loaded_from(tmp_path))
    asked = job(known.ref, tuning=tuning)
    before = fresh_policy(known.loaded, asked)
    files = checkpoint_files(before, asked)
    of(adapted(known), EXAMPLES)
    assert known.loaded.fallback.injected
    after = fresh_policy(known.loaded, asked)
    assert list(after.tensors) == list(before.tensors)
    assert export(after.tensors) == export(before.tensors)
    assert checkpoint_files(after, asked) == files


@torch.no_grad()
def by_the_book(model: PreTrainedModel, asked: SampleRequest, prompt: Sequence[int]) -> Turn:
    """The sampler's contract as a plain loop: the whole text goes through the model for each
    token."""
    rng = CounterRng(asked.key, seed=asked.params.seed, prompt=prompt_hash(prompt), occurrence=0)
    ids, logprobs = list(prompt), list[float]()
    while len(logprobs) < asked.params.max_new_tokens and ids[-1] != 6:
        tokens, chosen = draw_tokens(
            model(input_ids=torch.tensor([ids])).logits[:, -1],
            temperatures=[asked.params.temperature],
            top_ps=[1.0],
            uniforms=[rng.uniform_at(len(logprobs))],
        )
        ids, logprobs = ids + tokens, logprobs + chosen
    return Turn(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(ids[len(prompt) :]),
        logprobs=tuple(logprobs),
        text="",
        finish_reason="stop" if ids[-1] == 6 else "length",
    )


async def test_the_sampler_is_the_plain_loop(known: Known, engine: Engine) -> None:
    for sample in range(2):
        asked = request("what is it?", sample=sample, model=known.ref, max_new_tokens=24)
        turn = await engine.sampler.sample(asked)
        book = by_the_book(known.plain, asked, turn.prompt_ids)
        assert turn.completion_ids == book.completion_ids
        assert turn.logprobs == pytest.approx(book.logprobs, abs=AGREES)


async def test_a_grpo_step_moves_every_adapter(known: Known, engine: Engine, shelf: Shelf) -> None:
    asked = job(known.ref)
    first = await engine.learner.initialize(asked)
    policy = shelf.policy(first.state)
    turns = [
        await engine.sampler.sample(request(sample=i, model=known.ref, policy=policy))
        for i in range(4)
    ]
    samples = tuple(
        SampleRecord(
            index=i,
            sequences=(
                Row(
                    tokens=turn.prompt_ids + turn.completion_ids,
                    loss_mask=loss_mask(len(turn.prompt_ids), len(turn.completion_ids)),
                    logprobs=(0.0,) * len(turn.prompt_ids) + turn.logprobs,
                ),
            ),
        )
        for i, turn in enumerate(turns)
    )
    group = GradedGroup(0, samples, (1.0, 0.0, 0.5, 0.0))
    held = await engine.sampler._cache.load_model(known.ref)
    before = {name: tensor.clone() for name, tensor in held.base.tensors.items()}
    step = await engine.learner.step(asked, StepBatch(1, groups=(group,)), export_state=True)
    assert step.metrics["train/sampler_mismatch"] <= AGREES
    moved = engine.learner._loaded[asked.run].policy.tensors
    still = [n for n, t in moved.items() if "lora_B" in n and not bool(t.detach().any())]
    assert not still
    assert all(torch.equal(before[name], tensor) for name, tensor in held.base.tensors.items())


def directory(config: PreTrainedConfig, folder: Path) -> ModelRef:
    save_random_model(config, folder)
    return ModelRef(kind="directory", name=str(folder))


SMALL: dict[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    ref = directory(BertConfig(**SMALL, intermediate_size=32, is_decoder=False), tmp_path)
    assert forward_pass({"model_type": "bert"}).runs == "refused"
    with pytest.raises(Refused, match=r"'bert'.* is not causal.*family that is tested: Gemma 3"):
        build_base(ref, {}, device=CPU)


def test_a_model_without_a_key_value_cache_is_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=103, hidden_size=16, num_hidden_layers=1, state_size=4)
    assert forward_pass({"model_type": "mamba"}).runs == "refused"
    with pytest.raises(Refused, match=r"'mamba'.* has no key-value cache"):
        build_base(directory(config, tmp_path), {}, device=CPU)


def test_an_architecture_without_a_causal_model_is_refused(tmp_path: Path) -> None:
    T5Config(d_model=16, num_layers=1).save_pretrained(tmp_path)
    assert forward_pass({"model_type": "t5"}).runs == "refused"
    with pytest.raises(Refused, match=r"'t5', which is not a causal language model"):
        build_base(ModelRef(kind="directory", name=str(tmp_path)), {}, device=CPU)


def test_an_architecture_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "brand-new"}')
    with pytest.raises(Refused, match=r"brand-new.*family that is tested: Gemma 3"):
        build_base(ModelRef(kind="directory", name=str(tmp_path)), {}, device=CPU)
